//! One table of registers, shared memory, scratch and spills. Scratch is memory traffic that nobody asked for; any of
//! it fails.

use super::code_objects::code_objects;
use super::resources::{self, Resources};

#[test]
#[cfg_attr(
    not(getp_code_objects),
    ignore = "this build has no code objects; make test-gpu makes one that has"
)]
fn no_kernel_spills() {
    println!(
        "{:<32} {:<8} {:>5} {:>5} {:>5} {:>7} {:>8} {:>7} {:>6}",
        "kernel", "target", "VGPR", "AGPR", "SGPR", "LDS", "scratch", "spills", "waves"
    );
    let objects = code_objects();
    assert!(!objects.is_empty(), "there are no code objects");
    let mut faults = Vec::new();
    for object in objects {
        for arch in resources::archs(&object) {
            let kernels = resources::of(&object, &arch);
            assert!(!kernels.is_empty(), "{} for {arch} has no kernel", object.file);
            for kernel in kernels {
                println!("{}", row(&kernel, &arch));
                if kernel.scratch_bytes > 0 || kernel.spills > 0 {
                    faults.push(format!("{} on {arch}", kernel.name));
                }
            }
        }
    }
    assert!(faults.is_empty(), "scratch or spills: {}", faults.join(", "));
}

fn row(kernel: &Resources, arch: &str) -> String {
    let Resources {
        name,
        registers,
        accumulators,
        scalars,
        shared_bytes,
        scratch_bytes,
        spills,
        waves,
        ..
    } = kernel;
    format!(
        "{name:<32} {arch:<8} {registers:>5} {accumulators:>5} {scalars:>5} {shared_bytes:>7} {scratch_bytes:>8} {spills:>7} {waves:>6}"
    )
}
