//! Errors as one line for people.

use std::error::Error;

/// An error with those of its causes that it does not name itself.
#[must_use]
pub fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    for cause in std::iter::successors(error.source(), |&cause| cause.source()) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Link {
        text: &'static str,
        source: Option<Box<Link>>,
    }

    #[test]
    fn nothing_is_said_twice() {
        let chain = ["no such file", "a: no such file", "cannot open a"];
        let mut error = None;
        for text in chain {
            error = Some(Box::new(Link { text, source: error }));
        }
        let error = error.unwrap();
        assert_eq!(with_causes(&error), "cannot open a: a: no such file");
        assert_eq!(with_causes(&Link { text: "alone", source: None }), "alone");
    }
}
