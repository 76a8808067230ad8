//! How long input is cut before it is encoded, as the release's own tokenizer does.
//!
//! A text is cut every 400,000 characters, and each part again where a run of characters that
//! are all space, or all not space, passes 25,000. The cuts change the ids of such a text, so they
//! are part of the tokenizer; they also bound the work of the splitting pattern.

/// Characters of a part.
const PART_CHARS: usize = 400_000;
/// Characters of a run of one kind.
const RUN_CHARS: usize = 25_000;

/// The pieces of `text`, in order; joined they are `text`. Nothing for an empty text.
pub(super) fn pieces(text: &str) -> impl Iterator<Item = &str> {
    Pieces { rest: text, part_chars: 0 }
}

struct Pieces<'a> {
    rest: &'a str,
    /// Characters of the current part that earlier pieces took.
    part_chars: usize,
}

impl<'a> Iterator for Pieces<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        let mut run_is_space = self.rest.chars().next().map(is_space)?;
        let mut run_chars = 0;
        for (at, c) in self.rest.char_indices() {
            if self.part_chars == PART_CHARS {
                self.part_chars = 0;
                return Some(self.cut(at));
            }
            if is_space(c) == run_is_space {
                run_chars += 1;
            } else {
                (run_chars, run_is_space) = (1, !run_is_space);
            }
            if run_chars > RUN_CHARS {
                return Some(self.cut(at));
            }
            self.part_chars += 1;
        }
        Some(std::mem::take(&mut self.rest))
    }
}

impl<'a> Pieces<'a> {
    fn cut(&mut self, at: usize) -> &'a str {
        let (piece, rest) = self.rest.split_at(at);
        self.rest = rest;
        piece
    }
}

/// Space as Python's `str.isspace` has it: Unicode's White_Space and the four separators
/// U+001C to U+001F.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(text: &str) -> Vec<usize> {
        let cut: Vec<&str> = pieces(text).collect();
        assert_eq!(cut.concat(), text);
        cut.iter().map(|piece| piece.chars().count()).collect()
    }

    #[test]
    fn short_text_is_one_piece() {
        assert_eq!(lengths(""), Vec::<usize>::new());
        assert_eq!(lengths("a b\u{1c}c"), [5]);
        assert_eq!(lengths(&"x".repeat(RUN_CHARS)), [RUN_CHARS]);
    }

    #[test]
    fn a_run_is_cut_at_its_limit() {
        assert_eq!(lengths(&"文".repeat(RUN_CHARS + 1)), [RUN_CHARS, 1]);
        assert_eq!(lengths(&" ".repeat(2 * RUN_CHARS + 3)), [RUN_CHARS, RUN_CHARS, 3]);
        let mixed = format!("{}{}", "a".repeat(RUN_CHARS), " \t\u{1f}\u{85}");
        assert_eq!(lengths(&mixed), [RUN_CHARS + 4]);
        // The run is counted from where it began, not from the last cut.
        let late = format!("ab {}", "c".repeat(RUN_CHARS + 1));
        assert_eq!(lengths(&late), [3 + RUN_CHARS, 1]);
    }

    #[test]
    fn a_part_is_cut_at_its_limit_and_starts_a_new_run() {
        let text = "word ".repeat(PART_CHARS / 5) + &"z".repeat(RUN_CHARS);
        assert_eq!(lengths(&text), [PART_CHARS, RUN_CHARS]);
        let text = format!("{}{}", "w ".repeat(PART_CHARS / 2 - 5), "z".repeat(RUN_CHARS + 10));
        assert_eq!(lengths(&text), [PART_CHARS, RUN_CHARS]);
        assert_eq!(lengths(&"a b ".repeat(PART_CHARS / 2)), [PART_CHARS, PART_CHARS]);
    }
}
