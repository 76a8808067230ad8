//! Files that are written beside their place and take it once they are whole.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use tempfile::TempPath;

/// The directory that a file lies in.
#[must_use]
pub fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A new file beside `path`, to be persisted there once it is whole; it is gone if its name is dropped
/// before that. `mode` is what its creation asks for; the umask applies.
///
/// # Errors
/// The system's, without the name of the new file: nobody asked for that one.
pub fn beside(path: &Path, mode: u32) -> io::Result<(File, TempPath)> {
    let create = |path: &Path| File::options().read(true).write(true).create_new(true).mode(mode).open(path);
    let made = tempfile::Builder::new().prefix(".k3-").make_in(directory_of(path), create)?;
    Ok(made.into_parts())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn it_takes_its_place_or_is_gone_and_errors_do_not_name_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        drop(beside(&path, 0o600).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let (mut file, temporary) = beside(&path, 0o600).unwrap();
        file.write_all(b"whole").unwrap();
        assert!(!path.exists());
        temporary.persist(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"whole");
        let error = beside(&dir.path().join("absent/x"), 0o600).unwrap_err().to_string();
        assert_eq!(error, io::Error::from_raw_os_error(2).to_string());
    }
}
