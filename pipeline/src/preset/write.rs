//! Writing a preset as commented TOML.

use std::fmt::Write as _;

use super::keys::KEYS;
use super::{KeyInfo, Preset, SCHEMA_VERSION};

impl Preset {
    /// Every key with its value as TOML; `None` where an optional key is absent.
    pub fn values(&self) -> impl Iterator<Item = (KeyInfo, Option<String>)> {
        KEYS.iter().map(|key| (key.info(), (key.get)(self)))
    }

    /// The preset as a TOML text that reads back as this preset, each key with its explanation.
    #[must_use]
    pub fn to_commented_toml(&self) -> String {
        let mut out = format!("schema = {SCHEMA_VERSION}\n");
        let mut section = "";
        for key in KEYS {
            let (this, name) = key.path.split_once('.').unwrap_or(("", key.path));
            if this != section {
                section = this;
                // Writing to a String cannot fail.
                let _ = write!(out, "\n[{section}]");
                out.push('\n');
            }
            out.push('\n');
            for line in key.about.lines() {
                let _ = writeln!(out, "# {line}");
            }
            let _ = writeln!(out, "# Allowed: {}.", key.allowed);
            let _ = match (key.get)(self) {
                Some(value) => writeln!(out, "{name} = {value}"),
                None => writeln!(out, "# {name} = …"),
            };
        }
        out
    }
}
