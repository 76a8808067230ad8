//! `model.safetensors.index.json`: which file holds which tensor.
//!
//! The headers are what is believed; the index is checked against them. Of half a million names only
//! hashes are kept.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use xxhash_rust::xxh3::xxh3_64;

use super::checkpoint_error::IndexFault;
use super::files::{self, OpenError};
use super::shard::Key;

/// Name of the index in a model directory.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// Name of the weights of a model in one file.
pub const SINGLE_FILE: &str = "model.safetensors";
/// Bytes of an index; the full model's has about 60 million.
pub const INDEX_BYTES_MAX: u64 = 512 << 20;

/// File names in order, each with the sorted hashes of the tensors it should hold.
pub(crate) type IndexedFiles = BTreeMap<String, Vec<u64>>;

/// Reads the index at `path`.
pub(crate) fn read(path: &Path) -> Result<IndexedFiles, IndexFault> {
    let mut by_file: IndexedFiles = BTreeMap::new();
    let mut bad_name = None;
    let mut hashes = Vec::new();
    walk(path, &mut |tensor, file| {
        let hash = xxh3_64(tensor.as_bytes());
        hashes.push(hash);
        if let Some(list) = by_file.get_mut(file) {
            list.push(hash);
        } else if is_plain_name(file) {
            by_file.insert(file.to_owned(), vec![hash]);
        } else if bad_name.is_none() {
            bad_name = Some(IndexFault::BadFileName { tensor: tensor.to_owned(), file: file.to_owned() });
        }
    })?;
    if let Some(fault) = bad_name {
        return Err(fault);
    }
    if by_file.is_empty() {
        return Err(IndexFault::NoWeightMap);
    }
    hashes.sort_unstable();
    if let Some(pair) = hashes.windows(2).find(|w| w[0] == w[1]) {
        let tensor = names_of(path, &[pair[0]])?.into_iter().next().map(|(tensor, _)| tensor);
        return Err(IndexFault::Repeated { tensor: tensor.unwrap_or_default() });
    }
    for list in by_file.values_mut() {
        list.sort_unstable();
        list.shrink_to_fit();
    }
    Ok(by_file)
}

/// Finds the names behind some sorted hashes, with their files: a second reading, for errors alone.
pub(crate) fn names_of(path: &Path, hashes: &[u64]) -> Result<Vec<(String, String)>, IndexFault> {
    let mut out = Vec::new();
    walk(path, &mut |tensor, file| {
        if hashes.binary_search(&xxh3_64(tensor.as_bytes())).is_ok() {
            out.push((tensor.to_owned(), file.to_owned()));
        }
    })?;
    Ok(out)
}

fn is_plain_name(file: &str) -> bool {
    !file.is_empty() && PathBuf::from(file).file_name() == Some(file.as_ref()) && !file.contains('\0')
}

fn walk(path: &Path, each: &mut dyn FnMut(&str, &str)) -> Result<(), IndexFault> {
    let text = files::read_small(path, INDEX_BYTES_MAX).map_err(|e| match e {
        OpenError::Io(e) => IndexFault::Unreadable(e),
        OpenError::NotAFile(what) => IndexFault::NotAFile(what),
        OpenError::TooLong(bytes) => IndexFault::TooLong { bytes, max: INDEX_BYTES_MAX },
    })?;
    let mut json = serde_json::Deserializer::from_slice(&text);
    json.deserialize_map(IndexVisitor { each }).and_then(|()| json.end()).map_err(IndexFault::NotJson)
}

struct IndexVisitor<'e> {
    each: &'e mut dyn FnMut(&str, &str),
}

impl<'de> Visitor<'de> for IndexVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = false;
        while let Some(Key(key)) = map.next_key()? {
            if key != "weight_map" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if seen {
                return Err(A::Error::custom("weight_map stands twice"));
            }
            seen = true;
            map.next_value_seed(WeightMap { each: &mut *self.each })?;
        }
        Ok(())
    }
}

struct WeightMap<'e> {
    each: &'e mut dyn FnMut(&str, &str),
}

impl<'de> DeserializeSeed<'de> for WeightMap<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some((Key(tensor), Key(file))) = map.next_entry()? {
            (self.each)(&tensor, &file);
        }
        Ok(())
    }
}
