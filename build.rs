//! Names the shared object, so that programs linked to it find it by SONAME.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libgetp.so");
}
