//! What the device can do.

use getp::backend::gpu::ceilings::Ceilings;
use getp::backend::gpu::open::context;

pub fn run(args: &super::Args) -> anyhow::Result<()> {
    for driver in super::usable(&args.options()?)? {
        let context = context(driver)?;
        let device = context.driver.device();
        println!("{}, {}: {}", context.name(), device.name, Ceilings::measure(&context)?);
    }
    Ok(())
}
