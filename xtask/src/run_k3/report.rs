//! What a run of `k3 generate` has cost and given.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use anyhow::{Context, anyhow};
use k3_pipeline::units::Bytes;
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::child::Ended;

/// Figures of a run, as `--json` prints them.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    pub preset: String,
    pub model: String,
    /// Hard limit on the memory of the process, page cache included.
    pub cap_bytes: Option<u64>,
    pub cap_enforced_by: Option<String>,
    /// Largest resident memory of the process, from the system.
    pub peak_rss_bytes: u64,
    /// Most that the cgroup held: the process and the page cache of its reads.
    pub cgroup_peak_bytes: Option<u64>,
    pub planned_bytes: Value,
    /// Of the output; of the prompt when no token was fed after it.
    pub seconds_per_token: f64,
    pub compute_seconds_per_token: f64,
    pub waited_seconds_per_token: f64,
    pub bytes_per_token: f64,
    pub prompt: Value,
    pub output: Value,
    pub expert_requests: u64,
    pub expert_hits: u64,
    pub open_seconds: f64,
    pub run_seconds: f64,
    /// Processor time of all threads from start to end, in `k3`'s own code.
    pub user_seconds: f64,
    /// The same in the system's code.
    pub system_seconds: f64,
    pub isa: Value,
    pub threads: Value,
    pub disks: Value,
    pub prompt_ids: Value,
    pub generated_ids: Value,
    /// SHA-256 of the logits of every position fed, as float32.
    pub logits_digest: String,
}

impl Report {
    /// Puts together what `k3` printed and what was seen from outside.
    ///
    /// # Errors
    /// A field of `k3`'s report is missing.
    pub fn new(ended: &Ended, logits_digest: String) -> anyhow::Result<Self> {
        let json = &ended.json;
        let stats = get(json, "stats")?;
        let store = get(stats, "store")?;
        let (prompt, output) = (get(stats, "prefill")?, get(stats, "decode")?);
        let phase = if number(output, "tokens")? > 0.0 { output } else { prompt };
        let tokens = number(phase, "tokens")?.max(1.0);
        let (seconds, waited) = (number(phase, "seconds")?, number(phase, "waited_seconds")?);
        let inside = stats.get("peak_rss_bytes").and_then(Value::as_u64).unwrap_or(0);
        Ok(Self {
            preset: get(stats, "preset")?.as_str().unwrap_or_default().to_owned(),
            model: String::new(),
            cap_bytes: None,
            cap_enforced_by: None,
            peak_rss_bytes: ended.peak_rss_bytes.max(inside),
            cgroup_peak_bytes: None,
            planned_bytes: get(stats, "planned_bytes")?.clone(),
            seconds_per_token: seconds / tokens,
            compute_seconds_per_token: (seconds - waited) / tokens,
            waited_seconds_per_token: waited / tokens,
            bytes_per_token: number(phase, "read_bytes")? / tokens,
            prompt: prompt.clone(),
            output: output.clone(),
            expert_requests: number(store, "expert_requests")? as u64,
            expert_hits: number(store, "expert_hits")? as u64,
            open_seconds: number(stats, "open_seconds")?,
            run_seconds: ended.seconds,
            user_seconds: ended.cpu.user_seconds,
            system_seconds: ended.cpu.system_seconds,
            isa: get(stats, "isa")?.clone(),
            threads: get(stats, "threads")?.clone(),
            disks: get(stats, "disks")?.clone(),
            prompt_ids: get(json, "prompt_ids")?.clone(),
            generated_ids: get(json, "generated_ids")?.clone(),
            logits_digest,
        })
    }

    /// Part of the experts that were found in the cache; 0 where none was asked for.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        self.expert_hits as f64 / (self.expert_requests as f64).max(1.0)
    }

    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let size = |bytes: u64| format!("{} ({bytes} bytes)", Bytes(bytes).human());
        let mut lines = vec![format!("preset       {}, model {}", self.preset, self.model)];
        if let (Some(cap), Some(by)) = (self.cap_bytes, &self.cap_enforced_by) {
            lines.push(format!("cap          {}, {by}", size(cap)));
        }
        lines.push(format!("peak RSS     {}", size(self.peak_rss_bytes)));
        lines
            .extend(self.cgroup_peak_bytes.map(|b| format!("cgroup peak  {}, page cache included", size(b))));
        lines.push(format!(
            "time         {:.2} s per token: {:.2} s computing, {:.2} s waiting for the disk",
            self.seconds_per_token, self.compute_seconds_per_token, self.waited_seconds_per_token
        ));
        lines.push(format!("read         {} per token", Bytes(self.bytes_per_token as u64).human()));
        lines.push(format!(
            "experts      {} asked for, {} in the cache",
            self.expert_requests, self.expert_hits
        ));
        lines.push(format!(
            "opened in    {:.2} s; the whole run took {:.1} s, {:.1} s of processor time, {:.1} s in the system",
            self.open_seconds, self.run_seconds, self.user_seconds, self.system_seconds
        ));
        lines.push(format!("ids          {} -> {}", self.prompt_ids, self.generated_ids));
        lines.push(format!("logits       sha256 {}", self.logits_digest));
        lines.join("\n")
    }
}

fn get<'v>(value: &'v Value, key: &str) -> anyhow::Result<&'v Value> {
    value.get(key).ok_or_else(|| anyhow!("the report of k3 has no {key}"))
}

fn number(value: &Value, key: &str) -> anyhow::Result<f64> {
    get(value, key)?.as_f64().ok_or_else(|| anyhow!("{key} in the report of k3 is no number"))
}

/// SHA-256 of the `logits` tensor of a file that `k3 generate --dump-logits` wrote.
///
/// # Errors
/// A file that is no such thing.
pub fn logits_digest(path: &Path) -> anyhow::Result<String> {
    let at = || format!("cannot read {}", path.display());
    let mut file = File::open(path).with_context(at)?;
    let mut length = [0; 8];
    file.read_exact(&mut length).with_context(at)?;
    let length = u64::from_le_bytes(length);
    let mut header = Vec::new();
    file.by_ref().take(length).read_to_end(&mut header).with_context(at)?;
    let header: Value = serde_json::from_slice(&header).with_context(at)?;
    let offset = |i: usize| header["logits"]["data_offsets"][i].as_u64();
    let (Some(begin), Some(end)) = (offset(0), offset(1)) else {
        return Err(anyhow!("{} has no tensor logits", path.display()));
    };
    file.seek(SeekFrom::Start(8 + length + begin)).with_context(at)?;
    let mut digest = Sha256::new();
    let hashed = io::copy(&mut file.take(end.saturating_sub(begin)), &mut digest).with_context(at)?;
    if hashed != end.saturating_sub(begin) || hashed == 0 {
        return Err(anyhow!("{}: {hashed} bytes of logits, {begin} to {end} expected", path.display()));
    }
    Ok(digest.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_logits_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("l");
        let write = |ids: u8, logits: u8, cut: usize| {
            let header = r#"{"logits":{"data_offsets":[0,4]},"ids":{"data_offsets":[4,8]}}"#;
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend(header.bytes());
            bytes.extend([[logits; 4], [ids; 4]].concat());
            bytes.truncate(bytes.len() - cut);
            std::fs::write(&path, bytes).unwrap();
            logits_digest(&path)
        };
        let one = write(1, 1, 0).unwrap();
        assert_eq!(write(2, 1, 0).unwrap(), one);
        assert_ne!(write(1, 2, 0).unwrap(), one);
        assert!(write(1, 1, 6).is_err());
        assert_eq!(one.len(), 64);
    }
}
