//! TOML values as the key table sees them, and the checks they share.

use toml::de::DeValue;

/// A TOML value without its place.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// A whole number; `None` where it does not fit 64 bits.
    Int(Option<i64>),
    /// A text.
    Text(String),
    /// true or false.
    Bool(bool),
    /// A list.
    List(Vec<Value>),
    /// A float, date or table: nothing here takes one.
    Other,
}

impl From<&DeValue<'_>> for Value {
    fn from(value: &DeValue<'_>) -> Self {
        match value {
            DeValue::Integer(i) => Self::Int(i64::from_str_radix(i.as_str(), i.radix()).ok()),
            DeValue::String(s) => Self::Text(s.as_ref().to_owned()),
            DeValue::Boolean(b) => Self::Bool(*b),
            DeValue::Array(items) => Self::List(items.iter().map(|v| Self::from(v.get_ref())).collect()),
            DeValue::Float(_) | DeValue::Datetime(_) | DeValue::Table(_) => Self::Other,
        }
    }
}

/// Why a value was not taken; empty when the key's own "allowed" says it all.
pub(super) type Refusal = String;

impl Value {
    /// A whole number from `min` to `max`.
    pub(super) fn count(&self, min: usize, max: usize) -> Result<usize, Refusal> {
        match self {
            Self::Int(Some(n)) => {
                usize::try_from(*n).ok().filter(|n| (min..=max).contains(n)).ok_or_else(String::new)
            }
            _ => Err(String::new()),
        }
    }

    /// A text.
    pub(super) fn text(&self) -> Result<&str, Refusal> {
        match self {
            Self::Text(s) => Ok(s),
            _ => Err(String::new()),
        }
    }

    /// One of the named choices.
    pub(super) fn choice<T: Copy>(&self, choices: &[(&str, T)]) -> Result<T, Refusal> {
        let text = self.text()?;
        choices.iter().find(|(name, _)| *name == text).map(|&(_, value)| value).ok_or_else(|| {
            nearest(text, choices.iter().map(|(name, _)| *name))
                .map_or_else(String::new, |n| format!("did you mean \"{n}\"?"))
        })
    }
}

/// The candidate most like `word`, if any is like it at all.
pub(super) fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .map(|c| (strsim::jaro_winkler(word, c), c))
        .filter(|(likeness, _)| *likeness > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, c)| c)
}
