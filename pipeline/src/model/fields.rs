//! Typed access to the fields of a JSON object that gathers problems instead of stopping at the first.

use std::cell::RefCell;

use super::config_error::{ConfigProblem, Expected};
use super::json::Json;

/// The fields of one object. Every getter returns `None` only after it has noted a problem.
pub(super) struct Fields<'a> {
    entries: &'a [(String, Json)],
    path: String,
    problems: &'a RefCell<Vec<ConfigProblem>>,
}

impl<'a> Fields<'a> {
    /// The fields of `entries`, whose own path is `path` (empty for the top).
    pub(super) fn new(
        entries: &'a [(String, Json)],
        path: String,
        problems: &'a RefCell<Vec<ConfigProblem>>,
    ) -> Self {
        Self { entries, path, problems }
    }

    /// Notes a problem.
    pub(super) fn note(&self, problem: ConfigProblem) {
        self.problems.borrow_mut().push(problem);
    }

    /// Path of a field from the top of the file.
    pub(super) fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// Names of all fields.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.entries.iter().map(|(key, _)| key.as_str())
    }

    /// The value of a field, if it is there. Of repeated keys the first: they are refused elsewhere.
    pub(super) fn get(&self, name: &str) -> Option<&'a Json> {
        self.entries.iter().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// The value of a field; absent and `null` are one.
    pub(super) fn get_some(&self, name: &str) -> Option<&'a Json> {
        self.get(name).filter(|v| **v != Json::Null)
    }

    fn required(&self, name: &str, expected: Expected) -> Option<&'a Json> {
        let value = self.get(name);
        if value.is_none() {
            self.note(ConfigProblem::Missing { field: self.path(name), expected });
        }
        value
    }

    pub(super) fn invalid(&self, name: &str, expected: Expected, found: &Json) -> ConfigProblem {
        ConfigProblem::Invalid { field: self.path(name), expected, found: found.to_string() }
    }

    pub(super) fn unsupported(&self, name: &str, found: &Json, supported: &'static str) -> ConfigProblem {
        ConfigProblem::Unsupported { field: self.path(name), found: found.to_string(), supported }
    }

    /// A required integer from `min` to `max`.
    pub(super) fn integer(&self, name: &str, min: u64, max: u64) -> Option<u64> {
        let expected = Expected::Count { min, max };
        match self.required(name, expected)? {
            Json::Unsigned(n) if (min..=max).contains(n) => Some(*n),
            other => {
                self.note(self.invalid(name, expected, other));
                None
            }
        }
    }

    /// A required count from 1 to `max`.
    pub(super) fn count(&self, name: &str, max: u64) -> Option<usize> {
        self.integer(name, 1, max).and_then(|n| usize::try_from(n).ok())
    }

    /// A count whose absence, or `null`, has a meaning of its own: the outer `None` is a problem, the
    /// inner one that meaning. With `must_stand` the field must be there, `null` or not.
    pub(super) fn optional_count(&self, name: &str, max: u64, must_stand: bool) -> Option<Option<usize>> {
        let expected = Expected::CountOrNull { min: 1, max };
        let value = if must_stand { Some(self.required(name, expected)?) } else { self.get(name) };
        match value {
            None | Some(Json::Null) => Some(None),
            Some(Json::Unsigned(n)) if (1..=max).contains(n) => usize::try_from(*n).ok().map(Some),
            Some(other) => {
                self.note(self.invalid(name, expected, other));
                None
            }
        }
    }

    /// A required number above `above` and at most `max`, as f32.
    pub(super) fn number(&self, name: &str, above: f64, max: f64) -> Option<f32> {
        let expected = Expected::Number { above, max };
        let value = self.required(name, expected)?;
        // A value that f32 turns into 0 or infinity is out of range as well.
        let found = as_f64(value).filter(|v| *v > above && *v <= max && (*v as f32).is_normal());
        if found.is_none() {
            self.note(self.invalid(name, expected, value));
        }
        found.map(|v| v as f32)
    }

    /// A number from `min` to below 0, or absent or `null`: see [`Self::optional_count`].
    pub(super) fn optional_negative(&self, name: &str, min: f64) -> Option<Option<f32>> {
        let Some(value) = self.get_some(name) else { return Some(None) };
        let found = as_f64(value).filter(|v| *v >= min && *v < 0.0 && (*v as f32).is_normal());
        if found.is_none() {
            self.note(self.invalid(name, Expected::Below0 { min }, value));
        }
        found.map(|v| Some(v as f32))
    }

    /// A required `true` or `false`.
    pub(super) fn flag(&self, name: &str) -> Option<bool> {
        match self.required(name, Expected::Bool)? {
            Json::Bool(v) => Some(*v),
            other => {
                self.note(self.invalid(name, Expected::Bool, other));
                None
            }
        }
    }

    /// A required flag that has only one supported value.
    pub(super) fn flag_must_be(&self, name: &str, value: bool, supported: &'static str) {
        if self.flag(name).is_some_and(|v| v != value) {
            self.note(self.unsupported(name, &Json::Bool(!value), supported));
        }
    }

    /// A required string that must be one of `values`.
    pub(super) fn text_must_be(&self, name: &str, values: &[&str], supported: &'static str) {
        match self.required(name, Expected::Text) {
            None => {}
            Some(Json::Text(v)) if values.contains(&v.as_str()) => {}
            Some(other @ Json::Text(_)) => self.note(self.unsupported(name, other, supported)),
            Some(other) => self.note(self.invalid(name, Expected::Text, other)),
        }
    }

    /// A field that nothing reads, but that would change the model if it had another value.
    pub(super) fn if_present_must_be(&self, name: &str, values: &[Json], supported: &'static str) {
        if let Some(found) = self.get(name)
            && !values.contains(found)
        {
            self.note(self.unsupported(name, found, supported));
        }
    }

    /// A required object.
    pub(super) fn object(&self, name: &str) -> Option<Fields<'a>> {
        match self.required(name, Expected::Object)? {
            Json::Object(entries) => Some(Fields::new(entries, self.path(name), self.problems)),
            other => {
                self.note(self.invalid(name, Expected::Object, other));
                None
            }
        }
    }

    /// A required list of integers of 0 or above.
    pub(super) fn layer_list(&self, name: &str) -> Option<Vec<u64>> {
        let value = self.required(name, Expected::LayerList)?;
        let Json::List(items) = value else {
            self.note(self.invalid(name, Expected::LayerList, value));
            return None;
        };
        let mut layers = Vec::with_capacity(items.len());
        for item in items {
            match item {
                Json::Unsigned(n) => layers.push(*n),
                other => {
                    self.note(self.invalid(name, Expected::LayerList, other));
                    return None;
                }
            }
        }
        Some(layers)
    }
}

fn as_f64(value: &Json) -> Option<f64> {
    match value {
        Json::Unsigned(n) => Some(*n as f64),
        Json::Negative(n) => Some(*n as f64),
        Json::Float(v) => Some(*v),
        _ => None,
    }
}
