//! A JSON tree that keeps what a lenient reader loses: repeated keys, and whether a number was
//! written as an integer.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// A JSON value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Json {
    /// `null`.
    Null,
    /// `true`, `false`.
    Bool(bool),
    /// A number without fraction or exponent, 0 or above.
    Unsigned(u64),
    /// A number without fraction or exponent, below 0.
    Negative(i64),
    /// Any other number.
    Float(f64),
    /// A string.
    Text(String),
    /// An array.
    List(Vec<Json>),
    /// An object in the order of the text, repeated keys included.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Reads a whole text; anything but white space after the value is an error.
    pub(crate) fn parse(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// Paths of all keys that stand twice in one object.
    pub(crate) fn repeated_keys(&self) -> Vec<String> {
        let mut found = Vec::new();
        self.collect_repeated("", &mut found);
        found
    }

    fn collect_repeated(&self, path: &str, found: &mut Vec<String>) {
        match self {
            Self::Object(entries) => {
                let mut seen = std::collections::HashSet::new();
                for (key, value) in entries {
                    let inner = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                    value.collect_repeated(&inner, found);
                    if !seen.insert(key) {
                        found.push(inner);
                    }
                }
            }
            Self::List(items) => {
                for (i, item) in items.iter().enumerate() {
                    item.collect_repeated(&format!("{path}[{i}]"), found);
                }
            }
            _ => {}
        }
    }
}

/// How the value is shown in errors: its text, or its kind where that would be long.
impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(v) => v.fmt(f),
            Self::Unsigned(v) => v.fmt(f),
            Self::Negative(v) => v.fmt(f),
            Self::Float(v) => write!(f, "{v:?}"),
            Self::Text(v) if v.chars().count() > TEXT_SHOWN_MAX => {
                write!(f, "the string {:?}…", v.chars().take(TEXT_SHOWN_MAX).collect::<String>())
            }
            Self::Text(v) => write!(f, "the string {v:?}"),
            Self::List(v) => write!(f, "a list of {}", v.len()),
            Self::Object(_) => f.write_str("an object"),
        }
    }
}

/// Characters of a string shown in an error.
const TEXT_SHOWN_MAX: usize = 60;

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E: de::Error>(self, v: bool) -> Result<Json, E> {
        Ok(Json::Bool(v))
    }

    fn visit_u64<E: de::Error>(self, v: u64) -> Result<Json, E> {
        Ok(Json::Unsigned(v))
    }

    fn visit_i64<E: de::Error>(self, v: i64) -> Result<Json, E> {
        Ok(Json::Negative(v))
    }

    fn visit_f64<E: de::Error>(self, v: f64) -> Result<Json, E> {
        Ok(Json::Float(v))
    }

    fn visit_str<E: de::Error>(self, v: &str) -> Result<Json, E> {
        Ok(Json::Text(v.to_owned()))
    }

    fn visit_string<E: de::Error>(self, v: String) -> Result<Json, E> {
        Ok(Json::Text(v))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Json::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Json::Object(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_repeated_keys_and_number_kinds() {
        let tree =
            Json::parse(r#"{"a": 1, "b": {"c": 2.0, "c": -3}, "l": [{"x": 0, "x": 0}], "a": 1e9}"#).unwrap();
        assert_eq!(tree.repeated_keys(), ["b.c", "l[0].x", "a"]);
        let Json::Object(entries) = tree else { panic!("not an object") };
        assert_eq!(entries[0].1, Json::Unsigned(1));
        assert_eq!(entries[3].1, Json::Float(1e9));
    }

    #[test]
    fn refuses_trailing_text_and_deep_nesting() {
        assert!(Json::parse("{} x").is_err());
        assert!(Json::parse(&"[".repeat(100_000)).is_err());
    }
}
