//! The presets that come with the program: the files under `presets/`, compiled in.

/// A preset that comes with the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Builtin {
    /// Its name.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

macro_rules! builtins {
    ($($name:literal),* $(,)?) => {
        /// Names of the built-in presets: the ladder by memory, then `auto` and `demo`.
        pub const BUILTIN_NAMES: [&str; [$($name),*].len()] = [$($name),*];

        static BUILTINS: &[Builtin] = &[$(Builtin {
            name: $name,
            text: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../presets/", $name, ".toml")),
        }),*];
    };
}

builtins!("pocket", "laptop", "desktop", "workstation", "server", "max", "auto", "demo");

/// The rungs of the ladder, by rising budget.
pub const LADDER: [&str; 6] = ["pocket", "laptop", "desktop", "workstation", "server", "max"];

/// The built-in of this name.
#[must_use]
pub fn builtin(name: &str) -> Option<Builtin> {
    BUILTINS.iter().copied().find(|b| b.name == name)
}

impl super::Preset {
    /// The model directory that the preset names. A built-in's is looked for below the working
    /// directory, then in the source tree that the program was built from.
    #[must_use]
    pub fn model_dir(&self) -> Option<std::path::PathBuf> {
        let named = self.model.clone()?;
        if named.exists() || builtin(&self.name).is_none() {
            return Some(named);
        }
        let built = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(&named);
        Some(if built.exists() { built } else { named })
    }
}
