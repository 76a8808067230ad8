//! A session in a file: everything needed to go on as if it had never stopped.
//!
//! ```text
//!   0  magic "K3SESSN\n"
//!   8  format version, u32          12  zero, u32
//!  16  model fingerprint, u128
//!  32  engine version that wrote it, length byte and UTF-8, 32 bytes
//!  64  name of the model, length byte and UTF-8, 64 bytes
//! 128  tokens, u64                 136  floats of state, u64      144  bytes of notes, u64
//! 152  tokens that are prompt, u64 160  sampler: seed, u64        168  sampler: words taken, u64
//! 176  marks, u64                  184  floats of a mark, u64     192  xxh3-64 of bytes 0..192
//! 200  token ids, u32 each; positions of the marks, u32 each, ascending; state, f32 each, in the order
//!      of `SequenceState::slices` (per layer the KDA state and the convolution history, or the latent
//!      cache); the marks, f32 each, in the order of `SequenceState::mark_slices`; notes
//!   -  xxh3-128 of bytes 200 to here
//! ```
//!
//! All numbers are little endian. A file is written beside its place and renamed into it, so it is
//! there whole or not at all. Nothing of a file is trusted before its checksum has been compared.

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::model::tensors::Fingerprint;
use crate::sample::RandomState;
use crate::session::Session;
use crate::temporary;
use crate::units::TokenId;

const MAGIC: &[u8; 8] = b"K3SESSN\n";
const FORMAT: u32 = 2;
const HEADER_BYTES: usize = 200;
const CHECKED_BYTES: usize = 192;
/// Most marks of a file.
const MARKS_MAX: u64 = 1 << 16;
const CHECKSUM_BYTES: u64 = 16;
/// Largest notes.
pub const NOTES_BYTES_MAX: u64 = 64 << 20;
/// Numbers converted at a time.
const CHUNK: usize = 1 << 14;

/// What a session file holds beside text and state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionMeta {
    /// The model that the state belongs to.
    pub fingerprint: Fingerprint,
    /// Its name, for people; at most 63 bytes are kept.
    pub model: String,
    /// How many tokens of the text are prompt, read or not: those after them count as output for the
    /// penalties.
    pub prompt_tokens: usize,
    /// Where the sampler's random numbers stand.
    pub random: RandomState,
    /// Anything the program wants to find again.
    pub notes: Vec<u8>,
}

/// Why a session was not saved or not resumed.
#[derive(Debug, thiserror::Error)]
pub enum SessionFileError {
    /// The file cannot be written.
    #[error("{path}: cannot write the session: {source}", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The file cannot be read.
    #[error("{path}: cannot read the session: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A pass that ended in the middle left a state that is no text's.
    #[error("the session is damaged by a pass that did not end: clear it or resume an older one")]
    DamagedState,
    /// Some other file.
    #[error("{path}: not a session file", path = path.display())]
    NotASession {
        /// The file.
        path: PathBuf,
    },
    /// A format of another version.
    #[error("{path}: session format {found}, but this program reads format {FORMAT}", path = path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u32,
    },
    /// Bytes that are not those that were written.
    #[error("{path}: the session file is damaged: {what}", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What shows it.
        what: &'static str,
    },
    /// A session of another model.
    #[error(
        "{path}: the session is of model {found_name:?} ({found}), not of this one ({expected})",
        path = path.display()
    )]
    ForeignModel {
        /// The file.
        path: PathBuf,
        /// The name of its model.
        found_name: String,
        /// Its model.
        found: Fingerprint,
        /// This model.
        expected: Fingerprint,
    },
    /// More tokens than fit.
    #[error("{path}: the session has {tokens} tokens, the context holds {context}", path = path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Tokens of the session.
        tokens: u64,
        /// Tokens that fit.
        context: usize,
    },
}

/// Writes a session; replaces what was at `path`.
///
/// # Errors
/// A damaged session, or a file that cannot be written; what was at `path` is left then.
pub fn save(path: &Path, session: &Session, meta: &SessionMeta) -> Result<(), SessionFileError> {
    if session.state().is_damaged() {
        return Err(SessionFileError::DamagedState);
    }
    let state = session.state();
    let mark = |position: usize| (position as u32, state.mark_slices(position).collect());
    let content = Content {
        tokens: session.tokens(),
        state: state.slices().collect(),
        marks: state.marked().into_iter().map(mark).collect(),
    };
    write(path, &content, meta).map_err(|source| SessionFileError::Write { path: path.to_path_buf(), source })
}

/// Makes `session` the saved one. Of more marks than it has room for, the first and the last ones stay.
///
/// # Errors
/// A file that is damaged, of another model, or too long for the session's context. The session is
/// left as it was if the header shows it, else it is empty.
pub fn resume(
    path: &Path,
    session: &mut Session,
    expected: Fingerprint,
) -> Result<SessionMeta, SessionFileError> {
    let mut reader = Reader::open(path, expected)?;
    let context = session.state().context();
    if reader.header.tokens > context as u64 {
        let tokens = reader.header.tokens;
        return Err(SessionFileError::TooLong { path: path.to_path_buf(), tokens, context });
    }
    let tokens: Vec<TokenId> = reader.numbers(reader.header.tokens)?.into_iter().map(TokenId).collect();
    let marks = reader.numbers(reader.header.marks)?;
    let outcome = session
        .restore(&tokens, |slice| reader.floats(slice))
        .and_then(|()| reader.marks(&marks, session))
        .and_then(|()| reader.finish());
    if outcome.is_err() {
        session.clear();
    }
    outcome
}

/// What a session is made of.
struct Content<'a> {
    tokens: &'a [TokenId],
    state: Vec<&'a [f32]>,
    /// Positions, ascending, each with its state.
    marks: Vec<(u32, Vec<&'a [f32]>)>,
}

fn floats(slices: &[&[f32]]) -> u64 {
    slices.iter().map(|slice| slice.len() as u64).sum()
}

fn write(path: &Path, content: &Content<'_>, meta: &SessionMeta) -> io::Result<()> {
    if meta.notes.len() as u64 > NOTES_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "notes too large"));
    }
    let (file, temporary) = temporary::beside(path, 0o600)?;
    let mut out = Hashing { inner: BufWriter::new(file), hash: Xxh3::new() };
    out.inner.write_all(&header_bytes(content, meta))?;
    let mut bytes = Vec::with_capacity(4 * CHUNK);
    for chunk in content.tokens.chunks(CHUNK) {
        out.put(chunk.iter().map(|id| id.0.to_le_bytes()), &mut bytes)?;
    }
    out.put(content.marks.iter().map(|(position, _)| position.to_le_bytes()), &mut bytes)?;
    let marks = content.marks.iter().flat_map(|(_, slices)| slices);
    for chunk in content.state.iter().chain(marks).flat_map(|slice| slice.chunks(CHUNK)) {
        out.put(chunk.iter().map(|x| x.to_le_bytes()), &mut bytes)?;
    }
    out.write_all(&meta.notes)?;
    let checksum = out.hash.digest128();
    out.inner.write_all(&checksum.to_le_bytes())?;
    out.inner.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
    temporary.persist(path).map_err(|error| error.error)?;
    // The rename itself must survive a crash too.
    File::open(temporary::directory_of(path))?.sync_all()
}

struct Hashing<W> {
    inner: W,
    hash: Xxh3,
}

impl<W: Write> Hashing<W> {
    fn put(&mut self, numbers: impl Iterator<Item = [u8; 4]>, bytes: &mut Vec<u8>) -> io::Result<()> {
        bytes.clear();
        numbers.for_each(|number| bytes.extend_from_slice(&number));
        self.write_all(bytes)
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.update(bytes);
        self.inner.write_all(bytes)
    }
}

fn header_bytes(content: &Content<'_>, meta: &SessionMeta) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, MAGIC);
    put(8, &FORMAT.to_le_bytes());
    put(16, &meta.fingerprint.0.to_le_bytes());
    put(32, &short_text::<32>(env!("CARGO_PKG_VERSION")));
    put(64, &short_text::<64>(&meta.model));
    let numbers = [
        content.tokens.len() as u64,
        floats(&content.state),
        meta.notes.len() as u64,
        meta.prompt_tokens as u64,
        meta.random.seed,
        meta.random.words,
        content.marks.len() as u64,
        content.marks.first().map_or(0, |(_, slices)| floats(slices)),
    ];
    for (index, number) in numbers.iter().enumerate() {
        put(128 + 8 * index, &number.to_le_bytes());
    }
    let checksum = xxh3_64(&header[..CHECKED_BYTES]);
    header[CHECKED_BYTES..].copy_from_slice(&checksum.to_le_bytes());
    header
}

/// A length byte and as many whole characters as fit.
fn short_text<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let end = text.floor_char_boundary(N - 1);
    bytes[0] = u8::try_from(end).unwrap_or_default();
    bytes[1..=end].copy_from_slice(&text.as_bytes()[..end]);
    bytes
}

struct Header {
    fingerprint: Fingerprint,
    model: String,
    tokens: u64,
    floats: u64,
    notes: u64,
    prompt_tokens: u64,
    random: RandomState,
    marks: u64,
    mark_floats: u64,
}

struct Reader {
    path: PathBuf,
    file: BufReader<File>,
    header: Header,
    /// Floats of state still to be read.
    floats_left: u64,
    hash: Xxh3,
    bytes: Vec<u8>,
}

impl Reader {
    fn open(path: &Path, expected: Fingerprint) -> Result<Self, SessionFileError> {
        let path = path.to_path_buf();
        let failed = |source| SessionFileError::Read { path: path.clone(), source };
        let file = File::open(&path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let mut file = BufReader::with_capacity(1 << 16, file);
        let mut bytes = [0; HEADER_BYTES];
        if length < HEADER_BYTES as u64 {
            return Err(SessionFileError::NotASession { path });
        }
        file.read_exact(&mut bytes).map_err(failed)?;
        let header = parse_header(&path, &bytes)?;
        let (found, found_name) = (header.fingerprint, header.model.clone());
        if found != expected {
            return Err(SessionFileError::ForeignModel { path, found_name, found, expected });
        }
        let floats_left = header.floats;
        let marks = header.mark_floats.checked_add(1).and_then(|n| n.checked_mul(header.marks));
        let payload = header.tokens.checked_add(header.floats);
        let payload = payload.zip(marks).and_then(|(a, b)| a.checked_add(b)).and_then(|n| n.checked_mul(4));
        let whole = payload
            .and_then(|n| n.checked_add(header.notes))
            .and_then(|n| n.checked_add(HEADER_BYTES as u64 + CHECKSUM_BYTES));
        if whole != Some(length) || header.notes > NOTES_BYTES_MAX || header.marks > MARKS_MAX {
            let what = "its length is not what its header says (was it cut off?)";
            return Err(SessionFileError::Damaged { path, what });
        }
        Ok(Self { path, file, header, floats_left, hash: Xxh3::new(), bytes: Vec::new() })
    }

    fn damaged(&self, what: &'static str) -> SessionFileError {
        SessionFileError::Damaged { path: self.path.clone(), what }
    }

    /// Fills `self.bytes` with the next `count` bytes.
    fn take(&mut self, count: usize) -> Result<(), SessionFileError> {
        self.bytes.resize(count, 0);
        self.file
            .read_exact(&mut self.bytes)
            .map_err(|source| SessionFileError::Read { path: self.path.clone(), source })?;
        self.hash.update(&self.bytes);
        Ok(())
    }

    fn numbers(&mut self, count: u64) -> Result<Vec<u32>, SessionFileError> {
        let mut left = usize::try_from(count).unwrap_or(usize::MAX);
        let mut found = Vec::with_capacity(left);
        while left > 0 {
            let count = left.min(CHUNK);
            self.take(4 * count)?;
            let (numbers, _) = self.bytes.as_chunks::<4>();
            found.extend(numbers.iter().map(|number| u32::from_le_bytes(*number)));
            left -= count;
        }
        Ok(found)
    }

    /// The next floats of the state.
    fn floats(&mut self, slice: &mut [f32]) -> Result<(), SessionFileError> {
        self.floats_left = self
            .floats_left
            .checked_sub(slice.len() as u64)
            .ok_or_else(|| self.damaged("it has less state than this model needs"))?;
        self.fill(slice)
    }

    fn fill(&mut self, slice: &mut [f32]) -> Result<(), SessionFileError> {
        for chunk in slice.chunks_mut(CHUNK) {
            self.take(4 * chunk.len())?;
            let (numbers, _) = self.bytes.as_chunks::<4>();
            for (x, number) in chunk.iter_mut().zip(numbers) {
                *x = f32::from_le_bytes(*number);
            }
        }
        Ok(())
    }

    /// The marks at `positions`: the first and the last of them go into `session`, as many as it has
    /// room for; the others are read past.
    fn marks(&mut self, positions: &[u32], session: &mut Session) -> Result<(), SessionFileError> {
        if self.floats_left > 0 {
            return Err(self.damaged("it has more state than this model needs"));
        }
        let mark_floats = session.state().mark_floats() as u64;
        let is_ascending = positions.is_sorted_by(|a, b| a < b);
        let is_within = positions.last().is_none_or(|last| u64::from(*last) <= self.header.tokens);
        if !positions.is_empty() && (!is_ascending || !is_within || self.header.mark_floats != mark_floats) {
            return Err(self.damaged("its marks are not those of its text"));
        }
        let room = session.state().marks_max();
        for (index, &position) in positions.iter().enumerate() {
            if is_kept(index, positions.len(), room) {
                session.restore_mark(position as usize, |slice| self.fill(slice))?;
            } else {
                self.skip(self.header.mark_floats)?;
            }
        }
        Ok(())
    }

    /// Reads past floats.
    fn skip(&mut self, floats: u64) -> Result<(), SessionFileError> {
        let mut left = usize::try_from(floats).unwrap_or(usize::MAX);
        while left > 0 {
            let count = left.min(CHUNK);
            self.take(4 * count)?;
            left -= count;
        }
        Ok(())
    }

    /// Reads what is left and compares the checksum.
    fn finish(&mut self) -> Result<SessionMeta, SessionFileError> {
        self.take(usize::try_from(self.header.notes).unwrap_or(usize::MAX))?;
        let notes = std::mem::take(&mut self.bytes);
        let computed = self.hash.digest128();
        self.take(CHECKSUM_BYTES as usize)?;
        if self.bytes != computed.to_le_bytes() {
            return Err(self.damaged("its checksum does not match its bytes"));
        }
        Ok(SessionMeta {
            fingerprint: self.header.fingerprint,
            model: self.header.model.clone(),
            prompt_tokens: usize::try_from(self.header.prompt_tokens).unwrap_or(usize::MAX),
            random: self.header.random,
            notes,
        })
    }
}

/// Whether mark `index` of `count` finds a place among `room`.
fn is_kept(index: usize, count: usize, room: usize) -> bool {
    let last = room - usize::from(room > 1);
    count <= room || (room > 1 && index == 0) || index + last >= count
}

fn parse_header(path: &Path, bytes: &[u8; HEADER_BYTES]) -> Result<Header, SessionFileError> {
    let path = || path.to_path_buf();
    let number = |at: usize| {
        let mut eight = [0; 8];
        eight.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(eight)
    };
    if !bytes.starts_with(MAGIC) {
        return Err(SessionFileError::NotASession { path: path() });
    }
    let format = number(8) as u32;
    if format != FORMAT {
        return Err(SessionFileError::Format { path: path(), found: format });
    }
    if number(CHECKED_BYTES) != xxh3_64(&bytes[..CHECKED_BYTES]) {
        return Err(SessionFileError::Damaged { path: path(), what: "the checksum of its header" });
    }
    let fingerprint = Fingerprint(u128::from(number(16)) | u128::from(number(24)) << 64);
    let name = &bytes[64..128];
    let model = String::from_utf8_lossy(&name[1..=usize::from(name[0]).min(63)]).into_owned();
    Ok(Header {
        fingerprint,
        model,
        tokens: number(128),
        floats: number(136),
        notes: number(144),
        prompt_tokens: number(152),
        random: RandomState { seed: number(160), words: number(168) },
        marks: number(176),
        mark_floats: number(184),
    })
}
