//! How [`super::args`] describes the memory that host and kernels share, so that the kernels' header can be made of it.
//!
//! The macro `shared` takes constants, formats and structs with their comments. It makes the Rust items, and tables of
//! them with each struct's size and each field's offset as the compiler laid it out. `tests/header/kernels.rs` prints
//! the tables as C++. Types of fields are written as in Rust; `*const f32` and `*mut f32` stand for addresses on the
//! device, which the kernels see as `const float*` and `float*` and the host holds as [`TypedPtr<f32>`](TypedPtr): a
//! buffer of integers where a kernel takes float32 values does not compile.
//!
//! cbindgen, which makes `include/getp.h`, is not used here. It knows no offsets, gives constants the type `uintptr_t`,
//! which would change the kernels' integer arithmetic, and puts comments on lines of their own.

use super::driver::DevicePtr;
use bytemuck::{Pod, Zeroable};
use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;

/// The address of values of type `T` where the device finds them: in its own memory, or in pinned host memory.
#[repr(transparent)]
pub struct TypedPtr<T>(DevicePtr, PhantomData<fn() -> T>);

impl<T> TypedPtr<T> {
    /// NULL.
    pub const NULL: Self = Self::new(DevicePtr::NULL);

    /// An address that values of type `T` lie at.
    pub const fn new(at: DevicePtr) -> Self {
        Self(at, PhantomData)
    }

    /// The address alone.
    pub const fn raw(self) -> DevicePtr {
        self.0
    }

    /// This address, or NULL.
    pub fn only_if(self, condition: bool) -> Self {
        if condition { self } else { Self::NULL }
    }

    /// For kernels that take several types there.
    pub const fn void(self) -> TypedPtr<c_void> {
        TypedPtr::new(self.0)
    }
}

impl<T> Clone for TypedPtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for TypedPtr<T> {}

impl<T> Default for TypedPtr<T> {
    fn default() -> Self {
        Self::NULL
    }
}

impl<T> fmt::Debug for TypedPtr<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

// SAFETY: it has the representation of its DevicePtr, whose zeros are an address; the marker has no bytes.
unsafe impl<T> Zeroable for TypedPtr<T> {}
// SAFETY: it has the representation of its DevicePtr, which is Pod; the marker has no bytes.
unsafe impl<T: 'static> Pod for TypedPtr<T> {}

/// A type as C++ names it.
#[derive(Clone, Copy, Debug)]
pub enum CType {
    /// `int`, `StepHeader`.
    Named(&'static str),
    /// `const float*`, or `float*` if the kernel may write there.
    Pointer {
        /// What lies there.
        to: &'static CType,
        /// Whether the kernel may write there.
        mutable: bool,
    },
    /// `unsigned reserved[3]`.
    Array {
        /// An element.
        of: &'static CType,
        /// Elements.
        length: usize,
    },
}

/// A type that fields may have.
pub trait Shared {
    /// What the host holds.
    type Host;
    /// What the kernels see.
    const C: CType;
}

macro_rules! scalars {
    ($($rust:ty = $c:literal),* $(,)?) => {$(
        impl Shared for $rust {
            type Host = Self;
            const C: CType = CType::Named($c);
        }
    )*};
}

scalars! {
    u8 = "unsigned char",
    u16 = "unsigned short",
    i16 = "short",
    i32 = "int",
    u32 = "unsigned",
    i64 = "long long",
    u64 = "unsigned long long",
    f32 = "float",
    f64 = "double",
    c_void = "void",
}

impl<T: Shared> Shared for *const T {
    type Host = TypedPtr<T>;
    const C: CType = CType::Pointer {
        to: &T::C,
        mutable: false,
    };
}

impl<T: Shared> Shared for *mut T {
    type Host = TypedPtr<T>;
    const C: CType = CType::Pointer {
        to: &T::C,
        mutable: true,
    };
}

impl<T: Shared, const N: usize> Shared for [T; N] {
    type Host = [T::Host; N];
    const C: CType = CType::Array { of: &T::C, length: N };
}

/// A named number: a constant, or a variant of [`super::args::Format`].
#[derive(Clone, Copy, Debug)]
pub struct Number {
    /// As Rust names it.
    pub name: &'static str,
    /// Lines of its comment.
    pub docs: &'static [&'static str],
    /// Its value.
    pub value: i64,
}

/// A struct that a kernel takes or that lies in memory.
#[derive(Clone, Copy, Debug)]
pub struct Struct {
    /// Its name on both sides.
    pub name: &'static str,
    /// Lines of its comment.
    pub docs: &'static [&'static str],
    /// Its size.
    pub bytes: usize,
    /// In order.
    pub fields: &'static [StructField],
}

/// A field of a [`Struct`].
#[derive(Clone, Copy, Debug)]
pub struct StructField {
    /// Its name on both sides.
    pub name: &'static str,
    /// Lines of its comment.
    pub docs: &'static [&'static str],
    /// Its type on the kernels' side.
    pub c: CType,
    /// Bytes in front of it.
    pub offset: usize,
}

/// See the module.
macro_rules! shared {
    (
        constants {
            $($(#[doc = $constant_doc:literal])* $constant:ident: $constant_type:ty = $value:expr;)*
        }
        $(#[doc = $formats_doc:literal])*
        formats {
            $($(#[doc = $variant_doc:literal])* $variant:ident = $number:literal,)*
        }
        structs {$(
            $(#[doc = $doc:literal])*
            #[derive($($derive:ident),*)]
            $name:ident {
                $($(#[doc = $field_doc:literal])* $field:ident: $type:ty,)*
            }
        )*}
    ) => {
        $($(#[doc = $constant_doc])* pub const $constant: $constant_type = $value;)*

        /// Every constant.
        pub const CONSTANTS: &[Number] = &[$(Number {
            name: stringify!($constant),
            docs: &[$($constant_doc),*],
            value: $constant as i64,
        }),*];

        $(#[doc = $formats_doc])*
        #[allow(missing_docs)] // their names say it
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, NoUninit)]
        #[repr(i32)]
        pub enum Format {
            $($(#[doc = $variant_doc])* $variant = $number,)*
        }

        impl Shared for Format {
            type Host = Self;
            const C: CType = CType::Named("int");
        }

        /// Every format.
        pub const FORMATS: &[Number] = &[$(Number {
            name: stringify!($variant),
            docs: &[$($variant_doc),*],
            value: $number,
        }),*];

        /// The comment of [`Format`].
        pub const FORMATS_DOCS: &[&str] = &[$($formats_doc),*];

        $(
            $(#[doc = $doc])*
            #[allow(missing_docs)] // the names of some fields say it
            #[derive(Clone, Copy, Debug, $($derive),*)]
            #[repr(C)]
            pub struct $name {
                $($(#[doc = $field_doc])* pub $field: <$type as Shared>::Host,)*
            }

            impl Shared for $name {
                type Host = Self;
                const C: CType = CType::Named(stringify!($name));
            }
        )*

        /// Every struct, those that others contain in front of them.
        pub const STRUCTS: &[Struct] = &[$(Struct {
            name: stringify!($name),
            docs: &[$($doc),*],
            bytes: size_of::<$name>(),
            fields: &[$(StructField {
                name: stringify!($field),
                docs: &[$($field_doc),*],
                c: <$type as Shared>::C,
                offset: offset_of!($name, $field),
            }),*],
        }),*];
    };
}
pub(super) use shared;
