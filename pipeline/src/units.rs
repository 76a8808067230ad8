//! Newtypes for the quantities that must not be mixed up.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Zero-based layer number. `config.json` counts layers from 1; only its reader knows that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LayerIndex(pub u16);

/// Zero-based number of a routed expert within its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ExpertId(pub u16);

/// A vocabulary entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TokenId(pub u32);

impl LayerIndex {
    /// The layer as an index into per-layer tables.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl ExpertId {
    /// The expert as an index into per-expert tables.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for LayerIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for ExpertId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A number of bytes, written by people as "8 GB", "512 MiB" or "17.5MB".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// Units of [`Bytes`], largest first; decimal and binary.
const BYTE_UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("kB", 1_000),
    ("B", 1),
];

/// Why a text is not a [`Bytes`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BytesError {
    /// Not a decimal number with a unit.
    #[error("not a size; write a number and a unit, as in \"8 GB\", \"512 MiB\" or \"17.5MB\"")]
    Malformed,
    /// A number alone.
    #[error("the unit is missing; write for example \"{0} GB\" or \"{0} MiB\"")]
    UnitMissing(String),
    /// A unit nobody knows.
    #[error("unknown unit \"{0}\"; known are B, kB, MB, GB, TB, KiB, MiB, GiB, TiB")]
    UnknownUnit(String),
    /// More than 2^64 - 1 bytes.
    #[error("more than a computer can address")]
    TooLarge,
}

impl FromStr for Bytes {
    type Err = BytesError;

    /// A decimal number without sign or exponent and a unit; a fraction of a byte is dropped. Zero
    /// needs no unit.
    fn from_str(text: &str) -> Result<Self, BytesError> {
        let text = text.trim();
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let digits_only = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
        if whole.is_empty() || number.ends_with('.') || !digits_only(fraction) {
            return Err(BytesError::Malformed);
        }
        let unit = unit.trim_start();
        let starts_like_exponent = unit.starts_with(['e', 'E'])
            && unit[1..].starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '+');
        if starts_like_exponent {
            return Err(BytesError::Malformed);
        }
        if unit.is_empty() {
            let zero = number.bytes().all(|b| b == b'0' || b == b'.');
            return if zero { Ok(Self(0)) } else { Err(BytesError::UnitMissing(number.to_owned())) };
        }
        let scale = BYTE_UNITS
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(unit))
            .map(|&(_, scale)| u128::from(scale))
            .ok_or_else(|| BytesError::UnknownUnit(unit.to_owned()))?;
        let whole: u128 = whole.parse().map_err(|_| BytesError::TooLarge)?;
        let kept = &fraction[..fraction.len().min(18)];
        let part = match kept.parse::<u128>() {
            Ok(digits) => digits * scale / 10u128.pow(u32::try_from(kept.len()).unwrap_or(0)),
            Err(_) => 0,
        };
        let total = whole.checked_mul(scale).and_then(|t| t.checked_add(part)).ok_or(BytesError::TooLarge)?;
        u64::try_from(total).map(Self).map_err(|_| BytesError::TooLarge)
    }
}

impl fmt::Display for Bytes {
    /// Exact: the largest unit that divides the number, so that parsing it gives the number again.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = BYTE_UNITS.iter().find(|&&(_, scale)| self.0 != 0 && self.0.is_multiple_of(scale));
        let (unit, scale) = exact.copied().unwrap_or(("B", 1));
        write!(f, "{} {unit}", self.0 / scale)
    }
}

impl Bytes {
    /// Rounded for people, in decimal units as disks count: "17.55 MB", "108.81 GB", "512 B".
    #[must_use]
    pub fn human(self) -> String {
        let decimal = BYTE_UNITS.iter().filter(|(name, _)| !name.contains('i'));
        match decimal.copied().find(|&(_, scale)| self.0 >= scale) {
            Some((unit, scale)) if scale > 1 => format!("{:.2} {unit}", self.0 as f64 / scale as f64),
            _ => format!("{} B", self.0),
        }
    }
}

impl Serialize for Bytes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Bytes per second, written as "3.5GB/s".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate(pub Bytes);

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let size = text.trim().strip_suffix("/s").ok_or("not a rate; write for example \"3.5GB/s\"")?;
        match size.parse::<Bytes>() {
            Ok(Bytes(0)) => Err("a rate of zero never ends".to_owned()),
            Ok(bytes) => Ok(Self(bytes)),
            Err(e) => Err(e.to_string()),
        }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/s", self.0.human())
    }
}

impl Rate {
    /// Seconds that `bytes` take.
    #[must_use]
    pub fn seconds(self, bytes: u64) -> f64 {
        bytes as f64 / self.0.0 as f64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_as_people_write_them() {
        let ok = [
            ("8 GB", 8_000_000_000),
            ("512 MiB", 512 << 20),
            ("17.5MB", 17_500_000),
            ("1gib", 1 << 30),
            ("0", 0),
            ("0.5 B", 0),
            (" 3 kB ", 3_000),
        ];
        for (text, bytes) in ok {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        use BytesError::{Malformed, TooLarge, UnitMissing, UnknownUnit};
        let bad = [
            ("-1", Malformed),
            ("nan", Malformed),
            ("", Malformed),
            ("1e30", Malformed),
            ("1e30 GB", Malformed),
            ("1.2.3 GB", Malformed),
            ("5. GB", Malformed),
            (".5 GB", Malformed),
            ("8", UnitMissing("8".into())),
            ("8 G", UnknownUnit("G".into())),
            ("8 EB", UnknownUnit("EB".into())),
            ("20000000 TB", TooLarge),
            ("99999999999999999999999999999999999999999 B", TooLarge),
        ];
        for (text, error) in bad {
            assert_eq!(text.parse::<Bytes>(), Err(error), "{text}");
        }
    }

    #[test]
    fn rates() {
        assert_eq!("3.5GB/s".parse(), Ok(Rate(Bytes(3_500_000_000))));
        for bad in ["3.5GB", "0 B/s", "-1 GB/s", "x/s"] {
            assert!(bad.parse::<Rate>().is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_for_people() {
        assert_eq!(Bytes(17_547_264).human(), "17.55 MB");
        assert_eq!(Bytes(434_110_464).human(), "434.11 MB");
        assert_eq!(Bytes(1_188_000_000).human(), "1.19 GB");
        assert_eq!(Bytes(12).human(), "12 B");
        assert_eq!(Bytes(0).human(), "0 B");
    }

    proptest! {
        #[test]
        fn display_parses_back(n: u64) {
            prop_assert_eq!(Bytes(n).to_string().parse::<Bytes>(), Ok(Bytes(n)));
        }

        #[test]
        fn parsing_never_panics(text in "\\PC*") {
            let _ = text.parse::<Bytes>();
            let _ = text.parse::<Rate>();
        }
    }
}
