//! Token bytes to text as they arrive.

/// Joins the bytes of tokens into text without ever giving out half a character.
///
/// Whatever way the bytes are cut into pushes, the text given out, with that of
/// [`finish`](Self::finish), is [`String::from_utf8_lossy`] of all of them: each maximal invalid
/// sequence becomes one U+FFFD. Bytes that may still become a character (at most three) wait.
#[derive(Clone, Debug, Default)]
pub struct StreamDecoder {
    /// The start of a character whose end has not come: 0 to 3 bytes at rest.
    waiting: Vec<u8>,
}

impl StreamDecoder {
    /// A decoder at the start of a text.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the bytes of the next token; appends to `text` every character that is now certain.
    pub fn push(&mut self, bytes: &[u8], text: &mut String) {
        self.waiting.extend_from_slice(bytes);
        let mut taken = 0;
        for chunk in self.waiting.utf8_chunks() {
            text.push_str(chunk.valid());
            taken += chunk.valid().len();
            let invalid = chunk.invalid();
            // Only at the very end can a sequence still be completed.
            let may_go_on = taken + invalid.len() == self.waiting.len()
                && std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none());
            if !invalid.is_empty() && !may_go_on {
                text.push(char::REPLACEMENT_CHARACTER);
                taken += invalid.len();
            }
        }
        self.waiting.drain(..taken);
    }

    /// Ends the text: an unfinished character becomes one U+FFFD. The decoder starts anew.
    pub fn finish(&mut self, text: &mut String) {
        if !self.waiting.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
            self.waiting.clear();
        }
    }

    /// Whether bytes wait for the rest of their character.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> (String, Vec<String>) {
        let mut decoder = StreamDecoder::new();
        let (mut whole, mut steps) = (String::new(), Vec::new());
        for part in parts {
            let mut text = String::new();
            decoder.push(part, &mut text);
            assert!(decoder.waiting.len() <= 3);
            whole.push_str(&text);
            steps.push(text);
        }
        decoder.finish(&mut whole);
        assert!(!decoder.is_waiting());
        (whole, steps)
    }

    #[test]
    fn a_character_waits_for_its_last_byte() {
        let (_, steps) = run("a🚀é".as_bytes().chunks(1));
        assert_eq!(steps, ["a", "", "", "", "🚀", "", "é"]);
    }

    #[test]
    fn invalid_bytes_are_replaced_as_soon_as_they_are_certain() {
        let (whole, steps) = run([&b"\xf0\x9f"[..], &b"x"[..], &b"\xff\xe2\x82"[..]]);
        assert_eq!(steps, ["", "\u{fffd}x", "\u{fffd}"]);
        assert_eq!(whole, "\u{fffd}x\u{fffd}\u{fffd}");
    }

    /// Bytes in which broken and whole characters both are frequent.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            any::<char>().prop_map(|c| c.to_string().into_bytes()),
            any::<char>().prop_map(|c| {
                let mut bytes = c.to_string().into_bytes();
                bytes.pop();
                bytes
            }),
            prop::collection::vec(any::<u8>(), 1..4),
        ];
        prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn any_split_gives_the_lossy_text(bytes in bytes(), cuts in prop::collection::vec(0_usize..40, 0..8)) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let parts = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]);
            prop_assert_eq!(run(parts).0, String::from_utf8_lossy(&bytes));
        }
    }
}
