//! Refusals of a plan: all of them together, before anything is allocated.

use std::fmt;
use std::path::PathBuf;

use crate::units::Bytes;

use super::{BudgetSource, LedgerLine};

/// Why a preset cannot run this model on this machine.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct PlanError(pub Vec<Refusal>);

/// One reason.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
    /// More layers to pin than there are.
    TooManyPinned {
        /// Asked for.
        wanted: u16,
        /// Layers of the model.
        layers: usize,
    },
    /// A layer to pin that the model lacks.
    NoSuchLayer {
        /// Its zero-based number.
        layer: u16,
        /// Layers of the model.
        layers: usize,
    },
    /// A pack whose blocks nobody has measured.
    PackUnknown {
        /// The file.
        path: PathBuf,
    },
    /// Sizes beyond 64 bits.
    Overflow,
    /// Not enough memory.
    Memory(Box<MemoryShortage>),
}

/// A shortage of memory, with what takes it.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryShortage {
    /// Name of the preset.
    pub preset: String,
    /// What the preset needs at least.
    pub needed_bytes: u64,
    /// What there is.
    pub budget_bytes: u64,
    /// Who says so.
    pub budget_from: BudgetSource,
    /// What the preset asks for, where it names a budget.
    pub asked_bytes: Option<u64>,
    /// The needed lines, as the preset asks.
    pub lines: Vec<LedgerLine>,
    /// Settings of the preset that can be lowered, `key = value`, by the key.
    pub settings: Vec<(&'static str, String)>,
    /// The smallest built-in preset that fits, with its planned bytes.
    pub fitting: Option<(&'static str, u64)>,
}

impl MemoryShortage {
    /// The setting that most of a line's memory follows, where it can be lowered.
    fn setting(&self, line: &LedgerLine) -> String {
        let key = match line.name.as_str() {
            "pinned layers" => "trunk.pinned",
            "pinned head" => "trunk.head",
            "expert arenas" => "experts.cache",
            "expert staging" => "experts.staging_slots",
            "ring" => "trunk.ring_slots",
            "KDA state" | "convolution history" | "samplers" => "context.sequences",
            "snapshots" => "context.snapshots",
            "latent KV cache" => "context.tokens",
            "drafts" => "pass.draft_tokens",
            "activations and logits" | "embedding rows" => "pass.tokens",
            _ => return String::new(),
        };
        let setting = self.settings.iter().find(|(path, _)| *path == key);
        setting.map_or_else(String::new, |(path, value)| format!(" ({path} = {value})"))
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyPinned { wanted, layers } => write!(
                f,
                "trunk.pinned asks for {wanted} layers, but the model has {layers}; use at most {layers}, \
                 \"all\" or \"fit\""
            ),
            Self::NoSuchLayer { layer, layers } => write!(
                f,
                "trunk.pinned names layer {layer}, but the model's layers are 0 to {}",
                layers.saturating_sub(1)
            ),
            Self::PackUnknown { path } => write!(
                f,
                "trunk.pack names {}, whose blocks are not known: a pack is read together with the weight \
                 files it was made from, not with a config.json alone",
                path.display()
            ),
            Self::Overflow => f.write_str(
                "the sizes asked for are beyond any machine; lower context.tokens, context.sequences or \
                 the slots",
            ),
            Self::Memory(shortage) => shortage.fmt(f),
        }
    }
}

impl fmt::Display for MemoryShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short = self.needed_bytes.saturating_sub(self.budget_bytes);
        write!(
            f,
            "preset \"{}\" needs at least {} for this model, but {} {}: {} short.",
            self.preset,
            Bytes(self.needed_bytes).human(),
            self.budget_from,
            Bytes(self.budget_bytes).human(),
            Bytes(short).human()
        )?;
        if let Some(asked) = self.asked_bytes.filter(|&a| a != self.budget_bytes) {
            write!(f, " The preset asks for {}.", Bytes(asked).human())?;
        }
        let mut largest: Vec<&LedgerLine> = self.lines.iter().filter(|l| l.bytes > 0).collect();
        largest.sort_by_key(|l| std::cmp::Reverse(l.bytes));
        let part = |l: &LedgerLine| format!("{} {}{}", l.name, Bytes(l.bytes).human(), self.setting(l));
        let parts: Vec<String> = largest.iter().take(5).map(|l| part(l)).collect();
        write!(f, " Most of it: {}.", parts.join(", "))?;
        if parts.iter().any(|part| part.ends_with(')')) {
            f.write_str(" What stands in brackets can be lowered with --set.")?;
        }
        match self.fitting {
            Some((name, bytes)) => write!(
                f,
                " The smallest preset that fits is \"{name}\" ({}): --preset {name}.",
                Bytes(bytes).human()
            ),
            None => f.write_str(" No built-in preset fits here."),
        }
    }
}
