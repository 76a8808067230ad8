//! Copies of a golden model with something wrong in them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tempfile::TempDir;

/// A private copy of a golden model that may be damaged at will. Every method panics when the copy is
/// not what the test believes it to be: a case that corrupts nothing must not pass.
#[derive(Debug)]
pub struct Model {
    dir: TempDir,
}

#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::missing_panics_doc)]
impl Model {
    /// Copies `golden/models/NAME`, without its golden vectors.
    #[must_use]
    pub fn copy_of(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(k3_golden::golden_dir().join("models").join(name)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
            }
        }
        Self { dir }
    }

    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A file in it.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Rewrites a text file, which must change.
    pub fn edit_text(&self, name: &str, edit: impl FnOnce(&str) -> String) {
        let old = fs::read_to_string(self.file(name)).unwrap();
        let new = edit(&old);
        assert_ne!(old, new, "{name} was not changed");
        fs::write(self.file(name), new).unwrap();
    }

    /// Edits a JSON file.
    pub fn edit_json(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        self.edit_text(name, |text| {
            let mut value: Value = serde_json::from_str(text).unwrap();
            edit(&mut value);
            serde_json::to_string_pretty(&value).unwrap()
        });
    }

    /// Edits the text model's part of config.json.
    pub fn edit_config(&self, edit: impl FnOnce(&mut Value)) {
        self.edit_json("config.json", |v| edit(&mut v["text_config"]));
    }

    /// Edits `weight_map` of the index.
    pub fn edit_index(&self, edit: impl FnOnce(&mut Map<String, Value>)) {
        self.edit_json("model.safetensors.index.json", |v| edit(v["weight_map"].as_object_mut().unwrap()));
    }

    /// Edits the bytes of a file.
    pub fn edit_bytes(&self, name: &str, edit: impl FnOnce(&mut Vec<u8>)) {
        let old = fs::read(self.file(name)).unwrap();
        let mut new = old.clone();
        edit(&mut new);
        assert_ne!(old, new, "{name} was not changed");
        fs::write(self.file(name), new).unwrap();
    }

    /// Edits the header of a weight file; the tensors' bytes stay as they are.
    pub fn edit_header(&self, shard: &str, edit: impl FnOnce(&mut Map<String, Value>)) {
        self.edit_bytes(shard, |bytes| {
            let n = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
            let mut header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
            edit(header.as_object_mut().unwrap());
            let text = serde_json::to_string(&header).unwrap();
            replace_header(bytes, &text);
        });
    }

    /// Edits the header's text, for what a JSON tree cannot say.
    pub fn edit_header_text(&self, shard: &str, edit: impl FnOnce(&str) -> String) {
        self.edit_bytes(shard, |bytes| {
            let n = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
            let text = edit(std::str::from_utf8(&bytes[8..8 + n]).unwrap());
            replace_header(bytes, &text);
        });
    }

    /// Overwrites bytes of one tensor, from `at` on.
    pub fn poke(&self, tensor: &str, at: usize, value: &[u8]) {
        self.edit_bytes(&self.shard_of(tensor), |bytes| {
            let n = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
            let header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
            let begin = header[tensor]["data_offsets"][0].as_u64().unwrap();
            let start = 8 + n + usize::try_from(begin).unwrap() + at;
            bytes[start..start + value.len()].copy_from_slice(value);
        });
    }

    /// The weight file that holds `tensor`.
    #[must_use]
    pub fn shard_of(&self, tensor: &str) -> String {
        let text = fs::read_to_string(self.file("model.safetensors.index.json")).unwrap();
        let index: Value = serde_json::from_str(&text).unwrap();
        index["weight_map"][tensor].as_str().unwrap().to_owned()
    }

    /// Removes a file.
    pub fn remove(&self, name: &str) {
        fs::remove_file(self.file(name)).unwrap();
    }

    /// Puts an empty directory in the place of a file.
    pub fn make_directory(&self, name: &str) {
        self.remove(name);
        fs::create_dir(self.file(name)).unwrap();
    }

    /// Puts a pipe that nobody writes to in the place of a file.
    pub fn make_pipe(&self, name: &str) {
        self.remove(name);
        let done = std::process::Command::new("mkfifo").arg(self.file(name)).status().unwrap();
        assert!(done.success());
    }

    /// Puts a link to itself in the place of a file: it can be read by nobody, not even by root.
    pub fn make_unreadable(&self, name: &str) {
        self.remove(name);
        symlink(self.file(name), self.file(name)).unwrap();
    }

    /// Cuts a file to `bytes` bytes.
    pub fn cut(&self, name: &str, bytes: u64) {
        let file = fs::File::options().write(true).open(self.file(name)).unwrap();
        file.set_len(bytes).unwrap();
    }
}

fn replace_header(bytes: &mut Vec<u8>, text: &str) {
    let old = bytes.first_chunk::<8>().map_or(0, |n| u64::from_le_bytes(*n));
    let mut header = text.as_bytes().to_vec();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut new = (header.len() as u64).to_le_bytes().to_vec();
    new.extend_from_slice(&header);
    new.extend_from_slice(bytes.get(8 + old as usize..).unwrap_or_default());
    *bytes = new;
}
