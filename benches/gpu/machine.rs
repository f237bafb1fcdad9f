//! The device's limits: its rates of copying memory and of matrix products.

use getp::backend::gpu::peaks::Peaks;

pub fn run(args: &super::Args) -> anyhow::Result<()> {
    for driver in super::usable(&args.options()?)? {
        let context = args.context(driver)?;
        let device = context.driver.device();
        println!("{}, {}: {}", context.name(), device.name, Peaks::measure(&context)?);
    }
    Ok(())
}
