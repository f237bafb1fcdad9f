//! Names the shared object, so that programs linked to it find it by SONAME, and compiles the kernels for the GPUs
//! asked for into code objects that the library carries.

mod build_support;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build_support");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libgetp.so");
    // Threads of the program call destructors that are in the library when they end, which may be behind `dlclose`.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    build_support::build_kernels();
    if std::env::var_os("CARGO_FEATURE_SIMT").is_some() {
        build_support::simt::build();
    }
}
