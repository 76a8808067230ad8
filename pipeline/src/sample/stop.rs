//! Where an answer stops: stop tokens, and stop strings across the borders of tokens.

use crate::units::TokenId;

/// Most stop strings.
pub const STOPS_MAX: usize = 64;
/// Most bytes of a stop string.
pub const STOP_BYTES_MAX: usize = 1024;

/// A stop string that is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// It would stop at once.
    #[error("stop string {index} is empty", index = index + 1)]
    Empty {
        /// Its place, from 0.
        index: usize,
    },
    /// It is too long.
    #[error("stop string {index} has {bytes} bytes: expected at most {max}", index = index + 1)]
    TooLong {
        /// Its place, from 0.
        index: usize,
        /// Its length.
        bytes: usize,
        /// The longest accepted.
        max: usize,
    },
    /// Too many.
    #[error("{found} stop strings: expected at most {max}")]
    TooMany {
        /// How many.
        found: usize,
        /// The most accepted.
        max: usize,
    },
}

/// Watches the text of an answer for stop strings.
///
/// The stop string whose end comes first stops; of several that end together, the longest. What
/// comes before it is given out, nothing of it, nothing after it. Text that may be the beginning
/// of a stop string waits. How the text is cut into pushes changes nothing.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    ids: Vec<TokenId>,
    strings: Vec<String>,
    /// The longest end of the text so far that a stop string begins with.
    held: String,
    stopped: Option<usize>,
}

impl StopMatcher {
    /// Watches for these.
    ///
    /// # Errors
    /// A string that is empty or too long, or too many of them.
    pub fn new(ids: Vec<TokenId>, strings: Vec<String>) -> Result<Self, StopError> {
        if strings.len() > STOPS_MAX {
            return Err(StopError::TooMany { found: strings.len(), max: STOPS_MAX });
        }
        for (index, string) in strings.iter().enumerate() {
            let bytes = string.len();
            match bytes {
                0 => return Err(StopError::Empty { index }),
                1..=STOP_BYTES_MAX => {}
                _ => return Err(StopError::TooLong { index, bytes, max: STOP_BYTES_MAX }),
            }
        }
        Ok(Self { ids, strings, held: String::new(), stopped: None })
    }

    /// Whether this token ends the answer; its text is not part of it.
    #[must_use]
    pub fn is_stop(&self, id: TokenId) -> bool {
        self.ids.contains(&id)
    }

    /// Which stop string ended the answer.
    #[must_use]
    pub fn stopped(&self) -> Option<&str> {
        self.stopped.and_then(|index| self.strings.get(index)).map(String::as_str)
    }

    /// Takes more text; appends what is certainly not part of a stop string. `true` when a stop
    /// string was completed, now or before: the answer has ended.
    pub fn push(&mut self, text: &str, out: &mut String) -> bool {
        if self.stopped.is_some() {
            return true;
        }
        for c in text.chars() {
            self.held.push(c);
            let ended = self.strings.iter().enumerate().filter(|(_, s)| self.held.ends_with(s.as_str()));
            if let Some((index, string)) = ended.max_by_key(|(_, s)| s.len()) {
                out.push_str(&self.held[..self.held.len() - string.len()]);
                self.held.clear();
                self.stopped = Some(index);
                return true;
            }
            let certain = self.certain();
            out.extend(self.held.drain(..certain));
        }
        false
    }

    /// Ends the answer without a stop: what waited is given out.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// Bytes of `held` before the longest end of it that begins a stop string.
    fn certain(&self) -> usize {
        let begins = |tail: &str| self.strings.iter().any(|s| s.starts_with(tail));
        let starts = self.held.char_indices().map(|(at, _)| at);
        starts.into_iter().find(|at| begins(&self.held[*at..])).unwrap_or(self.held.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(strings: &[String], parts: &[&str]) -> (String, Option<String>) {
        let mut stop = StopMatcher::new(Vec::new(), strings.to_vec()).unwrap();
        let mut out = String::new();
        for part in parts {
            stop.push(part, &mut out);
        }
        stop.finish(&mut out);
        (out, stop.stopped().map(str::to_owned))
    }

    /// Looks at every beginning of the text.
    fn slow(strings: &[String], text: &str) -> (String, Option<String>) {
        for (at, c) in text.char_indices() {
            let begun = &text[..at + c.len_utf8()];
            if let Some(stop) = strings.iter().filter(|s| begun.ends_with(s.as_str())).max_by_key(|s| s.len())
            {
                return (begun[..begun.len() - stop.len()].to_owned(), Some(stop.clone()));
            }
        }
        (text.to_owned(), None)
    }

    #[test]
    fn nothing_of_a_stop_string_is_given_out() {
        let mut stop = StopMatcher::new(vec![TokenId(7)], vec!["\n\nUser:".into(), "é!".into()]).unwrap();
        let mut out = String::new();
        assert!(!stop.push("Hi\n", &mut out));
        assert_eq!(out, "Hi");
        assert!(!stop.push("\n\nUs", &mut out));
        assert_eq!(out, "Hi\n");
        assert!(!stop.push("é", &mut out));
        assert_eq!(out, "Hi\n\n\nUs");
        assert!(stop.push("! and more", &mut out));
        assert!(stop.push("more", &mut out));
        stop.finish(&mut out);
        assert_eq!((out.as_str(), stop.stopped()), ("Hi\n\n\nUs", Some("é!")));
        assert!(stop.is_stop(TokenId(7)) && !stop.is_stop(TokenId(8)));
    }

    #[test]
    fn refused() {
        let new = |strings: Vec<String>| StopMatcher::new(Vec::new(), strings).unwrap_err();
        assert_eq!(new(vec!["a".into(), String::new()]), StopError::Empty { index: 1 });
        assert_eq!(new(vec!["é".repeat(513)]), StopError::TooLong { index: 0, bytes: 1026, max: 1024 });
        assert_eq!(new(vec!["a".into(); 65]), StopError::TooMany { found: 65, max: 64 });
    }

    proptest! {
        #[test]
        fn equals_the_slow_reference(
            strings in prop::collection::vec("[abé]{1,4}", 0..4),
            text in "[abcé]{0,24}",
            cuts in prop::collection::vec(0_usize..24, 0..6),
        ) {
            let chars: Vec<char> = text.chars().collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(chars.len())).collect();
            cuts.extend([0, chars.len()]);
            cuts.sort_unstable();
            let parts: Vec<String> = cuts.windows(2).map(|w| chars[w[0]..w[1]].iter().collect()).collect();
            let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
            let expected = slow(&strings, &text);
            prop_assert_eq!(&run(&strings, &parts), &expected);
            // Nothing is ever given out that would have to be taken back.
            let mut stop = StopMatcher::new(Vec::new(), strings).unwrap();
            let mut out = String::new();
            for part in parts {
                stop.push(part, &mut out);
                prop_assert!(expected.0.starts_with(&out), "{out:?} of {expected:?}");
            }
        }
    }
}
