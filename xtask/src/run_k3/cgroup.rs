//! A memory cgroup of one's own, v1 or v2, removed again whatever happens.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};

/// Groups are called this and the number of the process that made them.
const PREFIX: &str = "k3-xtask-";
/// A group is busy for a moment after its last process ended.
const REMOVALS: u32 = 50;
const REMOVAL_PAUSE: Duration = Duration::from_millis(40);

/// Names of a version's files.
#[derive(Debug, PartialEq, Eq)]
struct Files {
    version: &'static str,
    limit: &'static str,
    /// Memory and swap together in v1, swap alone in v2; absent where swap is not counted.
    swap: &'static str,
    peak: &'static str,
}

const V1: Files = Files {
    version: "v1",
    limit: "memory.limit_in_bytes",
    swap: "memory.memsw.limit_in_bytes",
    peak: "memory.max_usage_in_bytes",
};
const V2: Files = Files { version: "v2", limit: "memory.max", swap: "memory.swap.max", peak: "memory.peak" };

/// A group with a hard limit; dropping it removes it.
#[derive(Debug)]
pub struct Cgroup {
    dir: PathBuf,
    files: &'static Files,
}

impl Cgroup {
    /// A new group whose processes together get at most `limit` bytes, page cache included.
    ///
    /// # Errors
    /// Not root; no memory controller; a limit that the kernel does not take.
    pub fn create(limit: u64) -> anyhow::Result<Self> {
        let mounts =
            fs::read_to_string("/proc/self/mountinfo").context("cannot read /proc/self/mountinfo")?;
        let (root, files) = hierarchy(&mounts).ok_or_else(|| {
            anyhow!("no cgroup hierarchy with a memory controller is mounted: a hard cap needs one; --cap none runs without")
        })?;
        remove_left_over(&root);
        if files == &V2 {
            // The root group hands its controllers down only when asked to.
            let _ = fs::write(root.join("cgroup.subtree_control"), "+memory");
        }
        let dir = root.join(format!("{PREFIX}{}", std::process::id()));
        fs::create_dir(&dir).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => anyhow!(
                "cannot make the memory cgroup {}: {error}; a hard cap needs root (try sudo); --cap none runs without",
                dir.display()
            ),
            _ => anyhow!("cannot make the memory cgroup {}: {error}", dir.display()),
        })?;
        let group = Self { dir, files };
        group.write(files.limit, limit)?;
        if group.dir.join(files.swap).exists() {
            group.write(files.swap, if files == &V2 { 0 } else { limit })?;
        }
        let set = group.read(files.limit)?;
        if set > limit || set == 0 {
            bail!("{} says {set} after {limit} was written", group.dir.join(files.limit).display());
        }
        Ok(group)
    }

    /// "cgroup v1 /sys/fs/cgroup/memory/..."
    #[must_use]
    pub fn describe(&self) -> String {
        format!("cgroup {} {}", self.files.version, self.dir.display())
    }

    /// Where a process writes its number to enter.
    #[must_use]
    pub fn procs(&self) -> PathBuf {
        self.dir.join("cgroup.procs")
    }

    /// Most memory that the group has held, page cache included; `None` on kernels that do not tell.
    #[must_use]
    pub fn peak_bytes(&self) -> Option<u64> {
        self.read(self.files.peak).ok()
    }

    fn write(&self, file: &str, value: u64) -> anyhow::Result<()> {
        let path = self.dir.join(file);
        fs::write(&path, value.to_string())
            .with_context(|| format!("cannot write {value} to {}", path.display()))
    }

    fn read(&self, file: &str) -> anyhow::Result<u64> {
        let path = self.dir.join(file);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        text.trim().parse().with_context(|| format!("{} holds {text:?}", path.display()))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for _ in 0..REMOVALS {
            if fs::remove_dir(&self.dir).is_ok() || !self.dir.exists() {
                return;
            }
            thread::sleep(REMOVAL_PAUSE);
        }
        eprintln!("warning: {} is still in use; remove it with rmdir", self.dir.display());
    }
}

/// Where groups are made: the mount of the memory controller.
fn hierarchy(mounts: &str) -> Option<(PathBuf, &'static Files)> {
    let mounted = |kind: &str, option: Option<&str>| {
        mounts.lines().find_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            let mut right = right.split(' ');
            let (found, options) = (right.next()?, right.nth(1)?);
            let fits = found == kind && option.is_none_or(|o| options.split(',').any(|have| have == o));
            fits.then(|| PathBuf::from(left.split(' ').nth(4).unwrap_or_default()))
        })
    };
    if let Some(root) = mounted("cgroup", Some("memory")) {
        return Some((root, &V1));
    }
    mounted("cgroup2", None).map(|root| (root, &V2))
}

/// Removes empty groups whose makers were killed.
fn remove_left_over(root: &Path) {
    let Ok(entries) = fs::read_dir(root) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let maker = name.to_str().and_then(|n| n.strip_prefix(PREFIX)).and_then(|n| n.parse::<u32>().ok());
        if maker.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
            // One that still has processes cannot be removed, and is not.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_controller_is_found_in_both_versions() {
        let v1 = "35 31 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                  36 31 0:33 / /sys/fs/cgroup/memory rw,relatime shared:7 - cgroup cgroup rw,memory\n\
                  41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        assert_eq!(hierarchy(v1), Some((PathBuf::from("/sys/fs/cgroup/memory"), &V1)));
        let v2 = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(hierarchy(v2), Some((PathBuf::from("/sys/fs/cgroup"), &V2)));
        assert_eq!(hierarchy("22 1 0:2 / / rw - ext4 /dev/sda rw\n"), None);
    }

    #[test]
    fn only_groups_of_dead_makers_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let group = |name: String| {
            let dir = root.path().join(name);
            fs::create_dir(&dir).unwrap();
            dir
        };
        let alive = group(format!("{PREFIX}{}", std::process::id()));
        let dead = group(format!("{PREFIX}{}", u32::MAX));
        let other = group("system.slice".to_owned());
        remove_left_over(root.path());
        assert!(alive.exists() && !dead.exists() && other.exists());
    }
}
