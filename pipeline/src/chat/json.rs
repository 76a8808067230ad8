//! JSON texts with the spelling that the model was trained on.
//!
//! Argument values are spelt with a space after commas and colons, in the order given;
//! declarations without spaces and with sorted keys. Text stays UTF-8; numbers are spelt as Python
//! spells them. Integers beyond 64 bits are read, and therefore spelt, as floating point.

use std::io;

use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{CompactFormatter, Formatter, Serializer};

/// `{"k": [1, "two"]}`: keys in the order given.
pub(super) fn spaced(value: &Value) -> Result<String, serde_json::Error> {
    write(value, Spaced)
}

/// `{"a":1,"b":2}`: keys sorted at every depth.
pub(super) fn compact_sorted(mut value: Value) -> Result<String, serde_json::Error> {
    value.sort_all_objects();
    write(&value, Compact(CompactFormatter))
}

fn write<F: Formatter>(value: &Value, formatter: F) -> Result<String, serde_json::Error> {
    let mut bytes = Vec::new();
    value.serialize(&mut Serializer::with_formatter(&mut bytes, formatter))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(b": ")
    }

    fn write_f64<W: ?Sized + io::Write>(&mut self, w: &mut W, value: f64) -> io::Result<()> {
        w.write_all(python_float(value).as_bytes())
    }
}

struct Compact(CompactFormatter);

impl Formatter for Compact {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.0.begin_array_value(w, first)
    }

    fn write_f64<W: ?Sized + io::Write>(&mut self, w: &mut W, value: f64) -> io::Result<()> {
        w.write_all(python_float(value).as_bytes())
    }
}

/// The shortest digits that give `value` back, with an exponent below 1e-4 and from 1e16 on.
fn python_float(value: f64) -> String {
    if (1e-4..1e16).contains(&value.abs()) || value == 0.0 {
        return format!("{value:?}");
    }
    // Rust writes `1.5e-7` and `1e300`; Python has a sign and at least two digits.
    let text = format!("{value:e}");
    let Some((digits, exponent)) = text.split_once('e') else { return text };
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{exponent:0>2}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_spelt_as_python_does() {
        let spelt = [
            (1.5, "1.5"),
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (0.0001, "0.0001"),
            (0.000_01, "1e-05"),
            (1.25e-7, "1.25e-07"),
            (1e15, "1000000000000000.0"),
            (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
            (1e16, "1e+16"),
            (-1e300, "-1e+300"),
            (5e-324, "5e-324"),
        ];
        for (value, text) in spelt {
            assert_eq!(python_float(value), text);
        }
    }

    #[test]
    fn both_spellings() {
        let value: Value =
            serde_json::from_str(r#"{"b":[1,"é\n\u0001",{}],"a":{"z":1e-7,"y":null}}"#).unwrap();
        assert_eq!(spaced(&value).unwrap(), r#"{"b": [1, "é\n\u0001", {}], "a": {"z": 1e-07, "y": null}}"#);
        assert_eq!(compact_sorted(value).unwrap(), r#"{"a":{"y":null,"z":1e-07},"b":[1,"é\n\u0001",{}]}"#);
    }
}
