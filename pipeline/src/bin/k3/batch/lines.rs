//! Lines of the input, read beside the computation: a pipe that is slow does not hold up what runs.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, sync_channel};
use std::thread;
use std::time::Duration;

use anyhow::Context;

use crate::failure::Failure;

/// A longer line is no request.
const LINE_BYTES_MAX: u64 = 64 << 20;
/// Lines read ahead.
const AHEAD: usize = 16;
/// How long one waits before looking whether to stop.
const PATIENCE: Duration = Duration::from_millis(50);

/// A line with its number, from 1; or why it cannot be read.
pub(super) struct Line {
    pub(super) number: u64,
    pub(super) text: Result<String, String>,
}

/// What there is to read.
pub(super) enum Next {
    Line(Line),
    /// Nothing yet.
    NotYet,
    /// The input has ended.
    End,
}

/// The lines of a file, or of standard input.
pub(super) struct Lines(Receiver<Line>);

impl Lines {
    /// Opens `path`; "-" is standard input.
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        let input: Box<dyn Read + Send> = if path.as_os_str() == "-" {
            Box::new(io::stdin())
        } else {
            let shown = path.display();
            let file = File::open(path)
                .with_context(|| format!("{shown}: cannot read the requests"))
                .map_err(Failure::refused)?;
            if file.metadata().is_ok_and(|meta| meta.is_dir()) {
                return Err(Failure::refused(anyhow::anyhow!("{shown}: a directory, expected JSON lines")));
            }
            Box::new(file)
        };
        let (send, lines) = sync_channel(AHEAD);
        thread::Builder::new()
            .name("k3-lines".into())
            .spawn(move || {
                let mut input = BufReader::new(input);
                let mut number = 0;
                while let Some((text, is_last)) = next_line(&mut input) {
                    number += 1;
                    // Nobody listens any more: the command is over.
                    if send.send(Line { number, text }).is_err() || is_last {
                        break;
                    }
                }
            })
            .map_err(Failure::run)?;
        Ok(Self(lines))
    }

    /// The next line; waits a moment for it where there is nothing else to do.
    pub(super) fn next(&self, is_idle: bool) -> Next {
        let line = if is_idle {
            self.0.recv_timeout(PATIENCE).map_err(|e| e == RecvTimeoutError::Timeout)
        } else {
            self.0.try_recv().map_err(|e| e == TryRecvError::Empty)
        };
        match line {
            Ok(line) => Next::Line(line),
            Err(true) => Next::NotYet,
            Err(false) => Next::End,
        }
    }
}

/// A line without its end, or what is wrong with it, and whether that ends the input; `None` after the last.
fn next_line(input: &mut impl BufRead) -> Option<(Result<String, String>, bool)> {
    let mut bytes = Vec::new();
    match input.take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes) {
        Err(error) => Some((Err(format!("cannot read on: {error}")), true)),
        Ok(0) => None,
        Ok(n) if n as u64 == LINE_BYTES_MAX && bytes.last() != Some(&b'\n') => {
            Some((Err(format!("longer than {LINE_BYTES_MAX} bytes: the input ends here")), true))
        }
        Ok(_) => Some((text(bytes), false)),
    }
}

fn text(bytes: Vec<u8>) -> Result<String, String> {
    let text = String::from_utf8(bytes).map_err(|error| {
        format!(
            "not UTF-8 text: byte {} of the line begins no character",
            error.utf8_error().valid_up_to() + 1
        )
    })?;
    Ok(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_one_by_one() {
        let mut input: &[u8] = b"a\r\n\nab\xff\nlast";
        let mut lines = Vec::new();
        while let Some((line, is_last)) = next_line(&mut input) {
            assert!(!is_last);
            lines.push(line);
        }
        let bad = Err("not UTF-8 text: byte 3 of the line begins no character".to_owned());
        assert_eq!(lines, [Ok("a".into()), Ok(String::new()), bad, Ok("last".into())]);
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut input = BufReader::new(io::repeat(b'x'));
        assert!(next_line(&mut input).is_some_and(|(line, is_last)| line.is_err() && is_last));
    }
}
