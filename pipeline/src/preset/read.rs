//! Reading a preset: text to checked values, all problems together, each with line and column.

use std::io::Read as _;
use std::ops::Range;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::{NO_SCHEMA, Place, PresetError, Problem};
use super::keys::{KEYS, Key};
use super::value::{Value, nearest};
use super::{BUILTIN_NAMES, PassTokens, Preset, SCHEMA_VERSION, builtin};

/// A preset file is a page of text; anything longer is something else.
const FILE_BYTES_MAX: u64 = 1 << 20;

impl Preset {
    /// The built-in of this name, or the file at this path, with overrides `key=value` applied in order.
    ///
    /// # Errors
    /// An unknown name, an unreadable file, or every problem in the text and the overrides.
    pub fn load(name_or_path: &str, overrides: &[String]) -> Result<Self, PresetError> {
        let path = Path::new(name_or_path);
        let mut preset = match builtin(name_or_path) {
            Some(b) => Self::parse(b.name, &format!("presets/{}.toml", b.name), b.text)?,
            None if name_or_path.contains(['/', '\\']) || name_or_path.ends_with(".toml") => {
                Self::from_file(path)?
            }
            None => {
                return Err(PresetError::Unknown {
                    name: name_or_path.to_owned(),
                    nearest: nearest(name_or_path, BUILTIN_NAMES.into_iter()).map(str::to_owned),
                    known: BUILTIN_NAMES.join(", "),
                    path: format!("./{name_or_path}{}", if path.exists() { "" } else { ".toml" }),
                });
            }
        };
        preset.apply(overrides)?;
        Ok(preset)
    }

    /// Reads a preset file; its name is the file's without the ending.
    ///
    /// # Errors
    /// As [`Preset::load`].
    pub fn from_file(path: &Path) -> Result<Self, PresetError> {
        let read = |source| PresetError::Read { path: path.to_owned(), source };
        let not = |reason| PresetError::NotAFile { path: path.to_owned(), reason };
        let meta = std::fs::metadata(path).map_err(read)?;
        if !meta.is_file() {
            return Err(not("not a regular file"));
        }
        if meta.len() > FILE_BYTES_MAX {
            return Err(not("larger than 1 MiB"));
        }
        let mut bytes = Vec::new();
        let file = std::fs::File::open(path).map_err(read)?;
        file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).map_err(read)?;
        let text = String::from_utf8(bytes).map_err(|_| not("not UTF-8 text"))?;
        let name = path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned());
        Self::parse(&name, &path.display().to_string(), &text)
    }

    /// Reads a preset from its text; `source` names it in errors.
    ///
    /// # Errors
    /// Every problem in the text.
    pub fn parse(name: &str, source: &str, text: &str) -> Result<Self, PresetError> {
        let reader = Reader { source, text };
        let table = DeTable::parse(text).map_err(|e| {
            PresetError::NotToml(reader.problem(e.span().unwrap_or(0..0), e.message().to_owned()))
        })?;
        reader.preset(name, table.get_ref())
    }

    /// Applies overrides `key=value` through the checks that files go through. A value is TOML; a text
    /// needs no quotes.
    ///
    /// # Errors
    /// Every override that is unknown, malformed or out of range.
    pub fn apply(&mut self, overrides: &[String]) -> Result<(), PresetError> {
        let mut problems = Vec::new();
        for text in overrides {
            if let Err(what) = self.apply_one(text) {
                problems.push(Problem { place: Place::Set(text.clone()), what });
            }
        }
        problems.extend(
            self.contradiction().map(|(key, what)| Problem { place: Place::Set(format!("{key}=…")), what }),
        );
        if problems.is_empty() { Ok(()) } else { Err(PresetError::Invalid(problems)) }
    }

    fn apply_one(&mut self, text: &str) -> Result<(), String> {
        let (path, raw) =
            text.split_once('=').ok_or("write key=value, as in --set trunk.ring_slots=4".to_owned())?;
        let key = find_key(path.trim())?;
        let raw = raw.trim();
        let value = match DeValue::parse(raw) {
            Ok(v) if !matches!(v.get_ref(), DeValue::Float(_) | DeValue::Datetime(_)) => {
                Value::from(v.get_ref())
            }
            _ => Value::Text(raw.to_owned()),
        };
        (key.set)(self, &value).map_err(|why| refusal(key, raw, &why))
    }

    /// A pair of values that cannot stand together: the key to change, and why.
    fn contradiction(&self) -> Option<(&'static str, String)> {
        let (drafts, PassTokens::Fixed(tokens)) = (self.pass.draft_tokens, self.pass.tokens) else {
            return None;
        };
        (drafts > 0 && drafts >= tokens).then(|| {
            let what = format!(
                "pass.draft_tokens is {drafts} and pass.tokens is {tokens}: a pass holds the last token \
                 and its drafts, so drafts are at most pass.tokens - 1"
            );
            ("pass.draft_tokens", what)
        })
    }
}

/// What required keys a text lacks: each with what it takes, or just their names where they are many.
fn missing(seen: &[&str]) -> Option<String> {
    let keys: Vec<&Key> = KEYS.iter().filter(|k| k.required && !seen.contains(&k.path)).collect();
    match keys[..] {
        [] => None,
        [key] => Some(format!("{} is missing; allowed: {}", key.path, key.allowed)),
        _ => {
            let names: Vec<&str> = keys.iter().map(|k| k.path).collect();
            Some(format!("missing keys: {}; `k3 preset show` explains each", names.join(", ")))
        }
    }
}

fn find_key(path: &str) -> Result<&'static Key, String> {
    KEYS.iter().find(|k| k.path == path).ok_or_else(|| unknown_key(path))
}

fn unknown_key(path: &str) -> String {
    if is_section(path) {
        return format!("{path} is a section, not a value: write [{path}] and its keys below");
    }
    // A forgotten or wrong section is the likeliest slip, so the last part counts as much as the whole.
    fn last(path: &str) -> &str {
        path.rsplit('.').next().unwrap_or_default()
    }
    let paths = || KEYS.iter().map(|k| k.path);
    let with_last = |word: &str| paths().find(|p| last(p) == word);
    let near = with_last(last(path))
        // The name of a key where a section is expected, as in threads.count.
        .or_else(|| path.split('.').find_map(with_last))
        .or_else(|| nearest(path, paths()))
        .or_else(|| nearest(last(path), paths().map(last)).and_then(with_last));
    match near {
        Some(near) => format!("unknown key \"{path}\"; did you mean \"{near}\"?"),
        None => {
            format!(
                "unknown key \"{path}\"; keys are {}",
                KEYS.iter().map(|k| k.path).collect::<Vec<_>>().join(", ")
            )
        }
    }
}

fn refusal(key: &Key, found: &str, why: &str) -> String {
    let found = if found.is_empty() { "empty" } else { found };
    let shown: String = found.chars().take(60).collect();
    let dots = if shown.len() < found.len() { "…" } else { "" };
    let why = if why.is_empty() { String::new() } else { format!(" ({why})") };
    format!("{} cannot be {shown}{dots}{why}; allowed: {}", key.path, key.allowed)
}

/// A text being read.
struct Reader<'a> {
    source: &'a str,
    text: &'a str,
}

impl Reader<'_> {
    fn problem(&self, span: Range<usize>, what: String) -> Problem {
        let before = self.text.get(..span.start.min(self.text.len())).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |i| i + 1);
        let line = before.matches('\n').count() + 1;
        let column = before[line_start..].chars().count() + 1;
        Problem { place: Place::File { name: self.source.to_owned(), line, column }, what }
    }

    fn preset(&self, name: &str, table: &DeTable<'_>) -> Result<Preset, PresetError> {
        let mut preset = Preset::unset(name);
        let mut found = Vec::new();
        let mut seen = Vec::new();
        self.schema(table, &mut found);
        for (key, value) in table {
            let path = key.get_ref().as_ref();
            match value.get_ref() {
                _ if path == "schema" => {}
                DeValue::Table(section) if is_section(path) => {
                    for (key, value) in section {
                        let path = format!("{path}.{}", key.get_ref());
                        self.value(&mut preset, (&path, key.span()), value, &mut seen, &mut found);
                    }
                }
                DeValue::Table(_) if !KEYS.iter().any(|k| k.path == path) => {
                    found.push((key.span().start, self.problem(key.span(), unknown_section(path))));
                }
                _ => self.value(&mut preset, (path, key.span()), value, &mut seen, &mut found),
            }
        }
        found.sort_by_key(|(at, _)| *at);
        let mut problems: Vec<Problem> = found.into_iter().map(|(_, problem)| problem).collect();
        let whole = || Place::WholeFile { name: self.source.to_owned() };
        problems.extend(missing(&seen).map(|what| Problem { place: whole(), what }));
        if problems.is_empty() {
            problems.extend(preset.contradiction().map(|(_, what)| Problem { place: whole(), what }));
        }
        if problems.is_empty() { Ok(preset) } else { Err(PresetError::Invalid(problems)) }
    }

    fn value(
        &self,
        preset: &mut Preset,
        (path, key_span): (&str, Range<usize>),
        value: &Spanned<DeValue<'_>>,
        seen: &mut Vec<&'static str>,
        found: &mut Vec<(usize, Problem)>,
    ) {
        let key = match find_key(path) {
            Ok(key) => key,
            Err(what) => return found.push((key_span.start, self.problem(key_span, what))),
        };
        seen.push(key.path);
        if let Err(why) = (key.set)(preset, &Value::from(value.get_ref())) {
            let raw = self.text.get(value.span()).unwrap_or_default();
            found.push((value.span().start, self.problem(value.span(), refusal(key, raw, &why))));
        }
    }

    fn schema(&self, table: &DeTable<'_>, found: &mut Vec<(usize, Problem)>) {
        match table.get("schema") {
            None => {
                found.push((0, self.problem(0..0, format!("{NO_SCHEMA}; write schema = {SCHEMA_VERSION}"))));
            }
            Some(v) => {
                let version = Value::from(v.get_ref());
                if version != Value::Int(i64::try_from(SCHEMA_VERSION).ok()) {
                    let raw = self.text.get(v.span()).unwrap_or_default();
                    let what =
                        format!("schema {raw} is unknown; this program reads schema = {SCHEMA_VERSION}");
                    found.push((v.span().start, self.problem(v.span(), what)));
                }
            }
        }
    }
}

fn sections() -> impl Iterator<Item = &'static str> {
    KEYS.iter().filter_map(|k| Some(k.path.split_once('.')?.0))
}

fn is_section(name: &str) -> bool {
    sections().any(|section| section == name)
}

fn unknown_section(name: &str) -> String {
    let near = nearest(name, sections()).map_or_else(String::new, |n| format!("; did you mean [{n}]?"));
    format!("unknown section [{name}]{near}")
}
