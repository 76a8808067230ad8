//! The keys of a preset file: one table for reading, overriding, explaining and writing.

use std::path::PathBuf;

use super::value::{Refusal, Value};
use super::{CacheBudget, HeadPlace, KvStorage, MemoryBudget, PassTokens, Pinned, Preset};
use crate::plan::{CachePolicy, DirectMode, IoEngine};
use crate::units::Bytes;

/// One key.
pub(super) struct Key {
    /// Dotted path, as `--set` takes it.
    pub(super) path: &'static str,
    /// What it takes.
    pub(super) allowed: &'static str,
    /// What it does; lines of at most 96 characters.
    pub(super) about: &'static str,
    /// Whether a file must have it.
    pub(super) required: bool,
    /// Checks a value and puts it in its place.
    pub(super) set: fn(&mut Preset, &Value) -> Result<(), Refusal>,
    /// The value as TOML; `None` where an optional key is absent.
    pub(super) get: fn(&Preset) -> Option<String>,
}

/// What people may know about a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyInfo {
    /// Dotted path.
    pub path: &'static str,
    /// What it takes.
    pub allowed: &'static str,
    /// What it does.
    pub about: &'static str,
    /// Whether a file must have it.
    pub required: bool,
}

/// Every key, in the order files are written.
pub fn key_infos() -> impl Iterator<Item = KeyInfo> {
    KEYS.iter().map(Key::info)
}

impl Key {
    /// What people may know about it.
    pub(super) fn info(&self) -> KeyInfo {
        KeyInfo { path: self.path, allowed: self.allowed, about: self.about, required: self.required }
    }
}

/// Largest values of counts.
const LAYERS_MAX: usize = 4096;
const RING_SLOTS_MAX: usize = 1024;
const STAGING_SLOTS_MAX: usize = 4096;
const CONTEXT_TOKENS_MAX: usize = 1 << 24;
const SEQUENCES_MAX: usize = 256;
const SNAPSHOTS_MAX: usize = 64;
/// Most tokens of one pass.
pub const PASS_TOKENS_MAX: usize = 2048;
const DRAFT_TOKENS_MAX: usize = 64;
const DEPTH_MAX: usize = 256;
const THREADS_MAX: usize = 1024;
/// Limits of sizes.
const BUDGET_MIN: Bytes = Bytes(1_000_000);
const SIZE_MAX: Bytes = Bytes(1 << 50);
const BLOCK_MIN: Bytes = Bytes(1 << 10);
const BLOCK_MAX: Bytes = Bytes(1 << 30);

const HEADS: [(&str, HeadPlace); 3] =
    [("pinned", HeadPlace::Pinned), ("streamed", HeadPlace::Streamed), ("fit", HeadPlace::Fit)];
const POLICIES: [(&str, CachePolicy); 3] =
    [("layer-rank", CachePolicy::LayerRank), ("layer-lru", CachePolicy::LayerLru), ("lru", CachePolicy::Lru)];
const ENGINES: [(&str, IoEngine); 3] =
    [("auto", IoEngine::Auto), ("uring", IoEngine::Uring), ("pread", IoEngine::Pread)];
const DIRECT: [(&str, DirectMode); 3] =
    [("auto", DirectMode::Auto), ("on", DirectMode::On), ("off", DirectMode::Off)];
const ISAS: [(&str, Option<&str>); 4] =
    [("auto", None), ("scalar", Some("scalar")), ("avx2", Some("avx2")), ("neon", Some("neon"))];

/// The table.
pub(super) static KEYS: &[Key] = &[
    Key {
        path: "about",
        allowed: "a text of one line",
        about: "What the preset is for, in one line.",
        required: true,
        set: |p, v| {
            let text = v.text()?;
            if text.is_empty() || text.chars().any(char::is_control) {
                return Err(String::new());
            }
            p.about = text.to_owned();
            Ok(())
        },
        get: |p| Some(quoted(&p.about)),
    },
    Key {
        path: "model",
        allowed: "a path",
        about: "Model directory to use when the command names none, relative to the working directory.",
        required: false,
        set: |p, v| path(v).map(|path| p.model = Some(path)),
        get: |p| p.model.as_ref().map(|m| quoted(&m.to_string_lossy())),
    },
    Key {
        path: "memory.budget",
        allowed: "a size from 1 MB to 1 PiB as \"8 GB\", or \"auto\"",
        about: "Memory of the whole process, everything counted. \"auto\" is what the machine has free\n\
                when the plan is made, less head-room. A plan never takes more than the machine or the\n\
                process's cgroup leaves, whatever stands here.",
        required: true,
        set: |p, v| {
            p.budget = match v {
                Value::Text(text) if text == "auto" => MemoryBudget::Auto,
                _ => MemoryBudget::Limit(size(v, BUDGET_MIN, SIZE_MAX)?),
            };
            Ok(())
        },
        get: |p| {
            Some(match p.budget {
                MemoryBudget::Auto => quoted("auto"),
                MemoryBudget::Limit(b) => quoted(&b.to_string()),
            })
        },
    },
    Key {
        path: "trunk.pinned",
        allowed: "a number of layers, a list of zero-based layer numbers, \"all\", \"fit\", \"fit:N\", \
                  \"spread:N\" or \"prefix:N\"",
        about: "Layers that stay in memory. A number, or \"spread:N\", deals their bytes out over the blocks of\n\
                all layers, so that the disk always has work; \"prefix:N\" takes the first ones whole. \"fit\"\n\
                deals out as many as the budget allows, \"fit:N\" never fewer than N, or all of a smaller model.",
        required: true,
        set: |p, v| pinned(v).map(|pinned| p.trunk.pinned = pinned),
        get: |p| Some(pinned_text(&p.trunk.pinned)),
    },
    Key {
        path: "trunk.head",
        allowed: "\"pinned\", \"streamed\" or \"fit\"",
        about: "The output head: in memory, read every pass, or in memory if every layer is and room is\n\
                left.",
        required: true,
        set: |p, v| v.choice(&HEADS).map(|head| p.trunk.head = head),
        get: |p| Some(name_of(&HEADS, p.trunk.head)),
    },
    Key {
        path: "trunk.ring_slots",
        allowed: "a whole number from 1 to 1024",
        about: "Slots that streamed blocks pass through. One works, but reading then waits for computing;\n\
                three or more keep the disk busy. They also carry pinned blocks while those are loaded.",
        required: true,
        set: |p, v| v.count(1, RING_SLOTS_MAX).map(|n| p.trunk.ring_slots = n),
        get: |p| Some(p.trunk.ring_slots.to_string()),
    },
    Key {
        path: "trunk.block",
        allowed: "a size from 1 KiB to 1 GiB",
        about: "Size of a block: rows of one matrix, read at once. Large blocks suit disks, small ones\n\
                small memories.",
        required: true,
        set: |p, v| size(v, BLOCK_MIN, BLOCK_MAX).map(|block| p.trunk.block = block),
        get: |p| Some(quoted(&p.trunk.block.to_string())),
    },
    Key {
        path: "trunk.pack",
        allowed: "a path",
        about: "A packed trunk made by `k3 pack`, read instead of the checkpoint's own tensors.",
        required: false,
        set: |p, v| path(v).map(|path| p.trunk.pack = Some(path)),
        get: |p| p.trunk.pack.as_ref().map(|m| quoted(&m.to_string_lossy())),
    },
    Key {
        path: "experts.cache",
        allowed: "a size up to 1 PiB, 0 or \"fit\"",
        about: "Memory for cached experts, split evenly among the layers. \"fit\" takes what the budget\n\
                leaves after everything else.",
        required: true,
        set: |p, v| {
            p.experts.cache = match v {
                Value::Int(Some(0)) => CacheBudget::Limit(Bytes(0)),
                Value::Text(text) if text == "fit" => CacheBudget::Fit,
                _ => CacheBudget::Limit(size(v, Bytes(0), SIZE_MAX)?),
            };
            Ok(())
        },
        get: |p| {
            Some(match p.experts.cache {
                CacheBudget::Fit => quoted("fit"),
                CacheBudget::Limit(b) => quoted(&b.to_string()),
            })
        },
    },
    Key {
        path: "experts.staging_slots",
        allowed: "a whole number from 1 to 4096",
        about: "Slots for experts on their way through: as many can be read at once. A token asks for\n\
                num_experts_per_token experts in each layer.",
        required: true,
        set: |p, v| v.count(1, STAGING_SLOTS_MAX).map(|n| p.experts.staging_slots = n),
        get: |p| Some(p.experts.staging_slots.to_string()),
    },
    Key {
        path: "experts.policy",
        allowed: "\"layer-rank\", \"layer-lru\" or \"lru\"",
        about: "Which cached expert gives way: the one of least worth by recency, frequency and router\n\
                rank, the layer's least recently used, or (for comparison) the least recent of all.",
        required: true,
        set: |p, v| v.choice(&POLICIES).map(|policy| p.experts.policy = policy),
        get: |p| Some(name_of(&POLICIES, p.experts.policy)),
    },
    Key {
        path: "context.tokens",
        allowed: "a whole number from 1 to 16777216",
        about: "Positions that a sequence may hold, prompt and answer together.",
        required: true,
        set: |p, v| v.count(1, CONTEXT_TOKENS_MAX).map(|n| p.context.tokens = n),
        get: |p| Some(p.context.tokens.to_string()),
    },
    Key {
        path: "context.kv",
        allowed: "\"f32\"",
        about: "Number type of the latent KV cache. Only f32 exists: a shorter one would change the output.",
        required: true,
        set: |p, v| v.choice(&[("f32", KvStorage::F32)]).map(|kv| p.context.kv = kv),
        get: |p| Some(name_of(&[("f32", KvStorage::F32)], p.context.kv)),
    },
    Key {
        path: "context.sequences",
        allowed: "a whole number from 1 to 256",
        about: "Sequences that may be open at once; each has a state and a cache of its own.",
        required: true,
        set: |p, v| v.count(1, SEQUENCES_MAX).map(|n| p.context.sequences = n),
        get: |p| Some(p.context.sequences.to_string()),
    },
    Key {
        path: "context.snapshots",
        allowed: "a whole number from 0 to 64",
        about: "Places in a sequence that it can go back to without being read again: the end of the\n\
                instructions, the ends of turns. Each takes a copy of the state (434 MB in the release).",
        required: true,
        set: |p, v| v.count(0, SNAPSHOTS_MAX).map(|n| p.context.snapshots = n),
        get: |p| Some(p.context.snapshots.to_string()),
    },
    Key {
        path: "pass.tokens",
        allowed: "a whole number from 1 to 2048, or \"fit\"",
        about: "Tokens of one pass over the weights: the chunk in which a prompt is read. Larger reads\n\
                fewer bytes per prompt token and takes more workspace; \"fit\" takes what a sixteenth of\n\
                the memory holds. Results do not depend on it.",
        required: true,
        set: |p, v| {
            p.pass.tokens = match v {
                Value::Text(text) if text == "fit" => PassTokens::Fit,
                _ => PassTokens::Fixed(v.count(1, PASS_TOKENS_MAX)?),
            };
            Ok(())
        },
        get: |p| {
            Some(match p.pass.tokens {
                PassTokens::Fit => quoted("fit"),
                PassTokens::Fixed(n) => n.to_string(),
            })
        },
    },
    Key {
        path: "pass.draft_tokens",
        allowed: "a whole number from 0 to 64, below pass.tokens",
        about: "Drafted tokens that one pass may verify; 0 switches drafts off. Each takes room for what it\n\
                would put into the recurrence (13.6 MB in the release).",
        required: true,
        set: |p, v| v.count(0, DRAFT_TOKENS_MAX).map(|n| p.pass.draft_tokens = n),
        get: |p| Some(p.pass.draft_tokens.to_string()),
    },
    Key {
        path: "reader.engine",
        allowed: "\"auto\", \"uring\" or \"pread\"",
        about: "How reads are issued: io_uring, threads calling pread, or io_uring where a probe works.",
        required: true,
        set: |p, v| v.choice(&ENGINES).map(|engine| p.reader.engine = engine),
        get: |p| Some(name_of(&ENGINES, p.reader.engine)),
    },
    Key {
        path: "reader.direct",
        allowed: "\"auto\", \"on\" or \"off\"",
        about: "Whether reads bypass the page cache (O_DIRECT): where a probe read works, always, never.",
        required: true,
        set: |p, v| v.choice(&DIRECT).map(|direct| p.reader.direct = direct),
        get: |p| Some(name_of(&DIRECT, p.reader.direct)),
    },
    Key {
        path: "reader.depth",
        allowed: "a whole number from 1 to 256",
        about: "Reads under way at once, per disk.",
        required: true,
        set: |p, v| v.count(1, DEPTH_MAX).map(|n| p.reader.depth = n),
        get: |p| Some(p.reader.depth.to_string()),
    },
    Key {
        path: "compute.threads",
        allowed: "a whole number from 1 to 1024, or \"auto\"",
        about: "Compute threads; \"auto\" is one per core that the process may use. Results do not depend\n\
                on it.",
        required: true,
        set: |p, v| {
            p.compute.threads = match v {
                Value::Text(text) if text == "auto" => None,
                _ => Some(v.count(1, THREADS_MAX)?),
            };
            Ok(())
        },
        get: |p| Some(p.compute.threads.map_or_else(|| quoted("auto"), |n| n.to_string())),
    },
    Key {
        path: "compute.pin_threads",
        allowed: "true or false",
        about: "Whether each compute thread stays on a core of its own.",
        required: true,
        set: |p, v| match v {
            Value::Bool(b) => {
                p.compute.pin_threads = *b;
                Ok(())
            }
            _ => Err(String::new()),
        },
        get: |p| Some(p.compute.pin_threads.to_string()),
    },
    Key {
        path: "compute.isa",
        allowed: "\"auto\", \"scalar\", \"avx2\" or \"neon\"",
        about: "Instruction set; \"auto\" is the best this CPU has. Results do not depend on it.",
        required: true,
        set: |p, v| v.choice(&ISAS).map(|isa| p.compute.isa = isa.map(str::to_owned)),
        get: |p| Some(name_of(&ISAS, p.compute.isa.as_deref())),
    },
];

/// A TOML basic string.
fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

fn name_of<T: PartialEq>(choices: &[(&str, T)], value: T) -> String {
    let name = choices.iter().find(|(_, v)| *v == value).map_or("", |(name, _)| *name);
    quoted(name)
}

fn path(v: &Value) -> Result<PathBuf, Refusal> {
    let text = v.text()?;
    if text.is_empty() || text.contains('\0') { Err(String::new()) } else { Ok(PathBuf::from(text)) }
}

fn size(v: &Value, min: Bytes, max: Bytes) -> Result<Bytes, Refusal> {
    if matches!(v, Value::Int(_)) {
        return Err("a size is a text with a unit, as in \"8 GB\"".to_owned());
    }
    let size: Bytes = v.text()?.parse().map_err(|e: crate::units::BytesError| e.to_string())?;
    if (min..=max).contains(&size) { Ok(size) } else { Err(String::new()) }
}

fn layer_count(n: usize) -> Result<u16, Refusal> {
    u16::try_from(n).ok().filter(|_| n <= LAYERS_MAX).ok_or_else(|| format!("at most {LAYERS_MAX} layers"))
}

fn pinned(v: &Value) -> Result<Pinned, Refusal> {
    match v {
        Value::Int(_) => Ok(Pinned::Spread(layer_count(v.count(0, LAYERS_MAX)?)?)),
        Value::List(items) => {
            let mut layers = Vec::with_capacity(items.len());
            for item in items {
                layers.push(layer_count(item.count(0, LAYERS_MAX - 1)?)?);
            }
            layers.sort_unstable();
            match layers.windows(2).find(|w| w[0] == w[1]) {
                Some(w) => Err(format!("layer {} is listed twice", w[0])),
                None => Ok(Pinned::List(layers)),
            }
        }
        Value::Text(text) => pinned_word(text),
        Value::Bool(_) | Value::Other => Err(String::new()),
    }
}

fn pinned_word(text: &str) -> Result<Pinned, Refusal> {
    let (word, number) = text.split_once(':').map_or((text, None), |(word, n)| (word, Some(n)));
    let count = match number {
        None => None,
        Some(digits) if digits.bytes().all(|b| b.is_ascii_digit()) => {
            Some(layer_count(digits.parse().map_err(|_| String::new())?)?)
        }
        Some(_) => return Err("N is a whole number of layers".to_owned()),
    };
    match (word, count) {
        ("all", None) => Ok(Pinned::All),
        ("fit", n) => Ok(Pinned::Fit { at_least: n.unwrap_or(0) }),
        ("spread", Some(n)) => Ok(Pinned::Spread(n)),
        ("prefix", Some(n)) => Ok(Pinned::Prefix(n)),
        _ => Err(String::new()),
    }
}

fn pinned_text(pinned: &Pinned) -> String {
    match pinned {
        Pinned::Spread(n) => n.to_string(),
        Pinned::Prefix(n) => quoted(&format!("prefix:{n}")),
        Pinned::List(layers) => format!("{layers:?}"),
        Pinned::All => quoted("all"),
        Pinned::Fit { at_least: 0 } => quoted("fit"),
        Pinned::Fit { at_least } => quoted(&format!("fit:{at_least}")),
    }
}
