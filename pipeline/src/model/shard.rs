//! The header of one safetensors file, read without trusting a byte of it.
//!
//! Layout: 8 bytes little-endian header length n, n bytes of JSON (padded with spaces), then the
//! tensors' bytes. A checkpoint of the full model has half a million entries, so names are borrowed
//! from the header's text and dropped with it.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::checkpoint_error::FileFault;
use super::files::{self, OpenError};

/// Bytes of a header; the same limit as the format's own library.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Bytes before the header: its length.
const LENGTH_BYTES: u64 = 8;

/// A number type of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoredType {
    /// Its name in the header.
    pub(crate) name: &'static str,
    /// Bytes of one element.
    bytes: u64,
}

const STORED_TYPES: [StoredType; 16] = {
    const fn of(name: &'static str, bytes: u64) -> StoredType {
        StoredType { name, bytes }
    }
    [
        of("BF16", 2),
        of("F32", 4),
        of("U8", 1),
        of("BOOL", 1),
        of("I8", 1),
        of("F8_E5M2", 1),
        of("F8_E4M3", 1),
        of("F8_E8M0", 1),
        of("I16", 2),
        of("U16", 2),
        of("F16", 2),
        of("I32", 4),
        of("U32", 4),
        of("I64", 8),
        of("U64", 8),
        of("F64", 8),
    ]
};

/// One tensor of a file.
#[derive(Debug)]
pub(crate) struct Entry<'a> {
    /// Its name.
    pub(crate) name: Cow<'a, str>,
    /// Hash of its name.
    pub(crate) hash: u64,
    /// Its type.
    pub(crate) dtype: StoredType,
    /// Its shape.
    pub(crate) shape: Vec<u64>,
    /// First byte, from the start of the file.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) bytes: u64,
}

/// The raw header of an opened file.
#[derive(Debug)]
pub(crate) struct RawHeader {
    text: Vec<u8>,
    /// Bytes of the file.
    pub(crate) file_bytes: u64,
}

impl RawHeader {
    /// Reads the header of a file.
    pub(crate) fn read(path: &Path) -> Result<Self, FileFault> {
        let (file, file_bytes) = files::open_regular(path).map_err(|e| match e {
            OpenError::Io(e) => FileFault::Unreadable(e),
            OpenError::NotAFile(what) => FileFault::NotAFile(what),
            OpenError::TooLong(bytes) => FileFault::TooShort { bytes },
        })?;
        let header = read_length(&file, file_bytes)?;
        let max = HEADER_BYTES_MAX.min(file_bytes - LENGTH_BYTES);
        let len = usize::try_from(header).ok().filter(|_| header <= max);
        let Some(len) = len else {
            return Err(FileFault::HeaderLength { header, max, file: file_bytes });
        };
        let mut text = vec![0; len];
        file.read_exact_at(&mut text, LENGTH_BYTES).map_err(FileFault::Unreadable)?;
        Ok(Self { text, file_bytes })
    }

    /// Adds everything the header says to a fingerprint.
    pub(crate) fn fingerprint(&self, hasher: &mut Xxh3) {
        hasher.update(&self.file_bytes.to_le_bytes());
        hasher.update(&(self.text.len() as u64).to_le_bytes());
        hasher.update(&self.text);
    }

    /// The tensors in order of their bytes, which fill the file without overlap or hole.
    pub(crate) fn entries(&self) -> Result<Vec<Entry<'_>>, FileFault> {
        let current = RefCell::new(None);
        let mut json = serde_json::Deserializer::from_slice(&self.text);
        let raw = HeaderSeed { current: &current }.deserialize(&mut json).and_then(|raw| {
            current.replace(None);
            json.end()?;
            Ok(raw)
        });
        let raw = raw.map_err(|source| FileFault::HeaderJson { tensor: current.take(), source })?;
        let data_start = LENGTH_BYTES + self.text.len() as u64;
        let mut entries = Vec::with_capacity(raw.len());
        for (name, info) in raw {
            entries.push(checked_entry(name, info, data_start)?);
        }
        check_names(&entries)?;
        entries.sort_unstable_by_key(|e| (e.offset, e.bytes));
        self.check_tiling(&entries, data_start)?;
        Ok(entries)
    }

    fn check_tiling(&self, entries: &[Entry<'_>], data_start: u64) -> Result<(), FileFault> {
        let mut end = data_start;
        let mut before: &str = "the header";
        for e in entries {
            let tensor = e.name.to_string();
            let (begin, end_shown) = (e.offset - data_start, end - data_start);
            if e.offset < end {
                return Err(FileFault::Overlap { tensor, begin, other: before.to_owned(), end: end_shown });
            }
            if e.offset > end {
                return Err(FileFault::Hole { tensor, begin, end: end_shown });
            }
            end = e.offset + e.bytes;
            before = &e.name;
        }
        if end != self.file_bytes {
            return Err(FileFault::Length { expected: end, found: self.file_bytes });
        }
        Ok(())
    }
}

fn read_length(file: &File, file_bytes: u64) -> Result<u64, FileFault> {
    if file_bytes < LENGTH_BYTES {
        return Err(FileFault::TooShort { bytes: file_bytes });
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact_at(&mut length, 0).map_err(FileFault::Unreadable)?;
    Ok(u64::from_le_bytes(length))
}

fn checked_entry<'a>(name: Cow<'a, str>, info: Info<'a>, data_start: u64) -> Result<Entry<'a>, FileFault> {
    let Some(dtype) = STORED_TYPES.iter().find(|t| t.name == info.dtype).copied() else {
        return Err(FileFault::UnknownType { tensor: name.into_owned(), found: info.dtype.into_owned() });
    };
    let [begin, end] = info.data_offsets;
    if end < begin {
        return Err(FileFault::Backwards { tensor: name.into_owned(), begin, end });
    }
    let needed = info.shape.iter().try_fold(dtype.bytes, |n, d| n.checked_mul(*d));
    let offset = data_start.checked_add(begin);
    match (needed, offset) {
        (Some(bytes), Some(offset)) if bytes == end - begin && offset.checked_add(bytes).is_some() => {
            let hash = xxh3_64(name.as_bytes());
            Ok(Entry { name, hash, dtype, shape: info.shape, offset, bytes })
        }
        _ => Err(FileFault::Extent {
            tensor: name.into_owned(),
            shape: info.shape,
            dtype: dtype.name,
            needed: needed.map_or_else(|| "over 2^64".to_owned(), |n| n.to_string()),
            begin,
            end,
        }),
    }
}

fn check_names(entries: &[Entry<'_>]) -> Result<(), FileFault> {
    let mut hashes: Vec<u64> = entries.iter().map(|e| e.hash).collect();
    hashes.sort_unstable();
    let Some(pair) = hashes.windows(2).find(|w| w[0] == w[1]) else { return Ok(()) };
    let tensor = entries.iter().find(|e| e.hash == pair[0]).map(|e| e.name.to_string());
    Err(FileFault::Repeated { tensor: tensor.unwrap_or_default() })
}

/// What the header says of one tensor.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Info<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// A key borrowed from the text where it holds no escapes.
#[derive(Deserialize)]
#[serde(transparent)]
pub(crate) struct Key<'a>(#[serde(borrow)] pub(crate) Cow<'a, str>);

/// Reads the object of tensors and remembers the one under way, to name it in errors.
struct HeaderSeed<'c> {
    current: &'c RefCell<Option<String>>,
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = Vec<(Cow<'de, str>, Info<'de>)>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = Vec<(Cow<'de, str>, Info<'de>)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut out = Vec::new();
        while let Some(Key(name)) = map.next_key()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            match map.next_value() {
                Ok(info) => out.push((name, info)),
                Err(e) => {
                    self.current.replace(Some(name.into_owned()));
                    return Err(e);
                }
            }
        }
        Ok(out)
    }
}
