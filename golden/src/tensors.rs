//! Reading golden tensors: small safetensors files, whole, in memory.

use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};

/// Why golden numbers could not be read.
#[derive(Debug, thiserror::Error)]
pub enum GoldenError {
    /// The file could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is no safetensors file.
    #[error("{path} is no safetensors file: {reason}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        reason: String,
    },
    /// The tensor is absent.
    #[error("{path} has no tensor {name}")]
    Missing {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// The tensor has another type.
    #[error("{path}: tensor {name} is {found}, expected {expected}")]
    Type {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Type asked for.
        expected: &'static str,
        /// Type found.
        found: String,
    },
}

/// A tensor read whole, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor<T> {
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Its elements.
    pub data: Vec<T>,
}

impl<T> Tensor<T> {
    /// Row `index` of the tensor seen as [.., last dimension]; empty past the end.
    #[must_use]
    pub fn row(&self, index: usize) -> &[T] {
        let width = self.shape.last().copied().unwrap_or(1);
        self.data.get(index * width..(index + 1) * width).unwrap_or_default()
    }

    /// Number of rows of the tensor seen as [.., last dimension].
    #[must_use]
    pub fn rows(&self) -> usize {
        let width = self.shape.last().copied().unwrap_or(1);
        self.data.len().checked_div(width).unwrap_or(0)
    }
}

/// One file of golden tensors.
#[derive(Debug)]
pub struct Golden {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Golden {
    /// Reads the file whole and checks its header.
    ///
    /// # Errors
    /// When it cannot be read or is no safetensors file.
    pub fn open(path: &Path) -> Result<Self, GoldenError> {
        let bytes =
            std::fs::read(path).map_err(|source| GoldenError::Read { path: path.to_path_buf(), source })?;
        let golden = Self { path: path.to_path_buf(), bytes };
        golden.parsed()?;
        Ok(golden)
    }

    /// Names of all tensors, sorted.
    ///
    /// # Errors
    /// Never in practice: the header was checked by [`Golden::open`].
    pub fn names(&self) -> Result<Vec<String>, GoldenError> {
        let mut names: Vec<String> = self.parsed()?.names().into_iter().map(str::to_owned).collect();
        names.sort();
        Ok(names)
    }

    /// An F32 tensor.
    ///
    /// # Errors
    /// When it is absent or of another type.
    pub fn f32(&self, name: &str) -> Result<Tensor<f32>, GoldenError> {
        self.read(name, Dtype::F32, "F32", f32::from_le_bytes)
    }

    /// An F64 tensor.
    ///
    /// # Errors
    /// When it is absent or of another type.
    pub fn f64(&self, name: &str) -> Result<Tensor<f64>, GoldenError> {
        self.read(name, Dtype::F64, "F64", f64::from_le_bytes)
    }

    /// An I32 tensor.
    ///
    /// # Errors
    /// When it is absent or of another type.
    pub fn i32(&self, name: &str) -> Result<Tensor<i32>, GoldenError> {
        self.read(name, Dtype::I32, "I32", i32::from_le_bytes)
    }

    /// A U8 tensor.
    ///
    /// # Errors
    /// When it is absent or of another type.
    pub fn u8(&self, name: &str) -> Result<Tensor<u8>, GoldenError> {
        self.read(name, Dtype::U8, "U8", |[byte]: [u8; 1]| byte)
    }

    /// The bytes of a BF16 tensor, little endian, as [elements, 2].
    ///
    /// # Errors
    /// When it is absent or of another type.
    pub fn bf16_bytes(&self, name: &str) -> Result<Tensor<[u8; 2]>, GoldenError> {
        self.read(name, Dtype::BF16, "BF16", |bytes: [u8; 2]| bytes)
    }

    fn parsed(&self) -> Result<SafeTensors<'_>, GoldenError> {
        SafeTensors::deserialize(&self.bytes)
            .map_err(|error| GoldenError::Format { path: self.path.clone(), reason: error.to_string() })
    }

    fn read<T, const N: usize>(
        &self,
        name: &str,
        dtype: Dtype,
        expected: &'static str,
        element: impl Fn([u8; N]) -> T,
    ) -> Result<Tensor<T>, GoldenError> {
        let file = self.parsed()?;
        let view = file
            .tensor(name)
            .map_err(|_| GoldenError::Missing { path: self.path.clone(), name: name.to_owned() })?;
        if view.dtype() != dtype {
            let found = format!("{:?}", view.dtype());
            return Err(GoldenError::Type {
                path: self.path.clone(),
                name: name.to_owned(),
                expected,
                found,
            });
        }
        let data = view.data().as_chunks::<N>().0.iter().map(|bytes| element(*bytes)).collect();
        Ok(Tensor { shape: view.shape().to_vec(), data })
    }
}
