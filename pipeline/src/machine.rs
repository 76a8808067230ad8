//! What the machine offers: cores, free memory, cgroup limits. A plain value, so that plans are pure.

use std::fs;
use std::path::{Path, PathBuf};

/// A machine as a plan sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Cores that the process may use: affinity and CPU quota counted.
    pub cores: usize,
    /// Installed memory, `MemTotal`.
    pub memory_total_bytes: u64,
    /// Memory that can be had without swapping, `MemAvailable`.
    pub memory_available_bytes: u64,
    /// The cgroup that leaves least, where one limits the process.
    pub cgroup: Option<CgroupLimit>,
    /// Bytes of a page.
    pub page_bytes: usize,
}

/// A memory limit of a control group, the process's own or one around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupLimit {
    /// Its directory.
    pub path: PathBuf,
    /// The limit.
    pub limit_bytes: u64,
    /// In use now; page cache that can be dropped is not counted.
    pub used_bytes: u64,
}

impl CgroupLimit {
    /// What the group still allows.
    #[must_use]
    pub fn left_bytes(&self) -> u64 {
        self.limit_bytes.saturating_sub(self.used_bytes)
    }
}

/// Why the machine's state cannot be known.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// A file of the kernel cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file of the kernel lacks what it should say.
    #[error("{} does not state {what}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The line looked for.
        what: &'static str,
    },
    /// The number of cores is unknown.
    #[error("cannot count the usable cores: {0}")]
    Cores(std::io::Error),
}

/// Limits at or above this are the kernel's way to say "none".
const NO_LIMIT: u64 = 1 << 60;

impl Machine {
    /// This machine, now.
    ///
    /// # Errors
    /// When /proc cannot be read.
    pub fn detect() -> Result<Self, MachineError> {
        let cores = std::thread::available_parallelism().map_err(MachineError::Cores)?.get();
        Self::read(Path::new("/"), cores, rustix::param::page_size())
    }

    /// The machine whose /proc and cgroup trees lie under `root`.
    ///
    /// # Errors
    /// When `proc/meminfo` cannot be read or lacks a line.
    pub fn read(root: &Path, cores: usize, page_bytes: usize) -> Result<Self, MachineError> {
        let path = root.join("proc/meminfo");
        let text =
            fs::read_to_string(&path).map_err(|source| MachineError::Read { path: path.clone(), source })?;
        let field = |what: &'static str| {
            meminfo_bytes(&text, what).ok_or_else(|| MachineError::Missing { path: path.clone(), what })
        };
        Ok(Self {
            cores,
            memory_total_bytes: field("MemTotal")?,
            memory_available_bytes: field("MemAvailable")?,
            cgroup: tightest_cgroup(root),
            page_bytes,
        })
    }

    /// A machine with these cores whose memory never limits: for plans made for elsewhere.
    #[must_use]
    pub fn without_limits(&self) -> Self {
        Self { memory_total_bytes: u64::MAX, memory_available_bytes: u64::MAX, cgroup: None, ..self.clone() }
    }

    /// Memory that a process may take: what is available and what every cgroup around it leaves.
    #[must_use]
    pub fn memory_left_bytes(&self) -> u64 {
        let group = self.cgroup.as_ref().map_or(u64::MAX, CgroupLimit::left_bytes);
        self.memory_available_bytes.min(group)
    }
}

fn meminfo_bytes(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.split(':').next() == Some(field))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

/// A mounted cgroup hierarchy that knows memory.
struct Hierarchy {
    /// Mount point under `root`.
    mount: PathBuf,
    /// The process's group, relative to the mount.
    group: PathBuf,
    /// Version 1 or 2.
    files: &'static GroupFiles,
}

/// Names of a group's files.
struct GroupFiles {
    limits: &'static [&'static str],
    usage: &'static str,
    /// Lines of `memory.stat` that count droppable page cache.
    cache: [&'static str; 2],
}

const V1: GroupFiles = GroupFiles {
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    cache: ["total_inactive_file", "total_active_file"],
};
const V2: GroupFiles = GroupFiles {
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    cache: ["inactive_file", "active_file"],
};

fn tightest_cgroup(root: &Path) -> Option<CgroupLimit> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).unwrap_or_default();
    hierarchies(root, &groups, &mounts).iter().flat_map(Hierarchy::limits).min_by_key(CgroupLimit::left_bytes)
}

fn hierarchies(root: &Path, groups: &str, mounts: &str) -> Vec<Hierarchy> {
    let group_of = |wanted: &dyn Fn(&str, &str) -> bool| {
        groups.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (id, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            wanted(id, controllers).then(|| path.to_owned())
        })
    };
    let v1 = group_of(&|_, controllers| controllers.split(',').any(|c| c == "memory"));
    let v2 = group_of(&|id, controllers| id == "0" && controllers.is_empty());
    let mut out = Vec::new();
    for line in mounts.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        let (&[_, _, _, mount_root, mount, ..], &[kind, _, options, ..]) = (&left[..], &right[..]) else {
            continue;
        };
        let (group, files) = match kind {
            "cgroup" if options.split(',').any(|o| o == "memory") => (&v1, &V1),
            "cgroup2" => (&v2, &V2),
            _ => continue,
        };
        let Some(group) = group else { continue };
        let inside = Path::new(group).strip_prefix(mount_root).unwrap_or(Path::new(""));
        let group = inside.strip_prefix("/").unwrap_or(inside).to_owned();
        let mount = root.join(mount.trim_start_matches('/'));
        out.push(Hierarchy { mount, group, files });
    }
    out
}

impl Hierarchy {
    /// Limits of the group and of every group around it, up to the mount.
    fn limits(&self) -> Vec<CgroupLimit> {
        let leaf = self.mount.join(&self.group);
        leaf.ancestors()
            .take_while(|dir| dir.starts_with(&self.mount))
            .filter_map(|dir| self.limit(dir))
            .collect()
    }

    fn limit(&self, dir: &Path) -> Option<CgroupLimit> {
        let number = |name: &str| fs::read_to_string(dir.join(name)).ok()?.trim().parse::<u64>().ok();
        let limit_bytes = self.files.limits.iter().filter_map(|name| number(name)).min()?;
        if limit_bytes >= NO_LIMIT {
            return None;
        }
        let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
        let cache: u64 = stat
            .lines()
            .filter_map(|line| line.split_once(' '))
            .filter(|(name, _)| self.files.cache.contains(name))
            .filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok())
            .sum();
        let used_bytes = number(self.files.usage).unwrap_or(0).saturating_sub(cache);
        Some(CgroupLimit { path: dir.to_owned(), limit_bytes, used_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str =
        "MemTotal:       32000000 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\n";

    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new(files: &[(&str, &str)]) -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            for (path, text) in [("proc/meminfo", MEMINFO)].iter().chain(files) {
                let path = tree.0.path().join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            tree
        }

        fn machine(&self) -> Machine {
            Machine::read(self.0.path(), 4, 4096).unwrap()
        }
    }

    #[test]
    fn without_cgroups_memory_available_counts() {
        let m = Tree::new(&[]).machine();
        assert_eq!(m.memory_total_bytes, 32_000_000 * 1024);
        assert_eq!((m.memory_left_bytes(), m.cgroup), (20_000_000 * 1024, None));
    }

    #[test]
    fn v2_takes_the_tightest_group_around_the_process_and_forgives_page_cache() {
        let m = Tree::new(&[
            ("proc/self/cgroup", "0::/outer/inner\n"),
            ("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            ("sys/fs/cgroup/outer/memory.max", "1000000000\n"),
            ("sys/fs/cgroup/outer/memory.high", "max\n"),
            ("sys/fs/cgroup/outer/memory.current", "700000000\n"),
            ("sys/fs/cgroup/outer/memory.stat", "anon 1\ninactive_file 150000000\nactive_file 50000000\n"),
            ("sys/fs/cgroup/outer/inner/memory.max", "max\n"),
            ("sys/fs/cgroup/outer/inner/memory.high", "900000000\n"),
            ("sys/fs/cgroup/outer/inner/memory.current", "100000000\n"),
        ])
        .machine();
        let group = m.cgroup.clone().unwrap();
        assert!(group.path.ends_with("outer"));
        assert_eq!((group.limit_bytes, group.used_bytes), (1_000_000_000, 500_000_000));
        assert_eq!(m.memory_left_bytes(), 500_000_000);
    }

    #[test]
    fn v1_beside_an_empty_v2() {
        let m = Tree::new(&[
            ("proc/self/cgroup", "4:memory:/a/b\n3:cpuset:/\n0::/\n"),
            (
                "proc/self/mountinfo",
                "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:7 - cgroup cgroup rw,memory\n\
                 41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n",
            ),
            ("sys/fs/cgroup/unified/cgroup.procs", ""),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "2000000000\n"),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "600000000\n"),
            ("sys/fs/cgroup/memory/a/memory.stat", "cache 5\ntotal_inactive_file 100000000\n"),
            ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n"),
        ])
        .machine();
        assert_eq!(m.memory_left_bytes(), 1_500_000_000);
    }

    #[test]
    fn a_container_sees_its_own_group_at_the_mount() {
        let m = Tree::new(&[
            ("proc/self/cgroup", "0::/docker/abc\n"),
            ("proc/self/mountinfo", "31 23 0:28 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            ("sys/fs/cgroup/memory.max", "3000000000\n"),
            ("sys/fs/cgroup/memory.current", "1000\n"),
        ])
        .machine();
        assert_eq!(m.memory_left_bytes(), 2_999_999_000);
    }

    #[test]
    fn broken_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(Machine::read(dir.path(), 1, 4096), Err(MachineError::Read { .. })));
        fs::create_dir(dir.path().join("proc")).unwrap();
        fs::write(dir.path().join("proc/meminfo"), "MemTotal: 5 kB\n").unwrap();
        let error = Machine::read(dir.path(), 1, 4096).unwrap_err();
        assert!(error.to_string().ends_with("does not state MemAvailable"), "{error}");
    }

    #[test]
    fn this_machine_can_be_read() {
        let m = Machine::detect().unwrap();
        assert!(m.cores > 0 && m.memory_left_bytes() > 0 && m.page_bytes.is_power_of_two());
    }
}
