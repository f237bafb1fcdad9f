//! The lines that `warm_up` prints on stderr.

use crate::replica::Replica;
use crate::scheduler::Limits;
use crate::weights::PackedKind;

/// A line for each kind of tensor: they are the same in all replicas.
pub fn kind_lines(replicas: &[&dyn Replica]) -> Vec<String> {
    let kinds = replicas.first().map_or(&[][..], |first| &first.pack_report().kinds);
    kinds.iter().map(kind_line).collect()
}

/// Two lines for each replica, of which the second is `room`'s, what its KV cache has room for, with one for each of
/// its devices if it has several; and the number of replicas if there are several.
pub fn replica_lines(replicas: &[&dyn Replica], room: impl Fn(&dyn Replica) -> String) -> Vec<String> {
    let mut lines = Vec::new();
    for replica in replicas {
        lines.push(replica_line(*replica));
        lines.push(format!("  {}", room(*replica)));
        lines.extend(replica.stages().into_iter().map(|stage| format!("  {}", stage.name)));
    }
    if replicas.len() > 1 {
        let groups = replicas.iter().any(|replica| !replica.stages().is_empty());
        let what = if groups { "replicas" } else { "devices" };
        lines.push(format!("{} {what} share the requests", replicas.len()));
    }
    lines
}

/// What a KV cache has room for, where a sequence of the model may have `longest` positions.
pub fn room(limits: &Limits, longest: usize) -> String {
    match limits.at_once(longest) {
        0 => format!(
            "room for requests of up to {} of the model's {longest} positions",
            limits.most_positions_of_any().min(longest)
        ),
        1 => format!("room for a request of {longest} positions"),
        many => format!("room for {many} requests of {longest} positions"),
    }
}

fn replica_line(replica: &dyn Replica) -> String {
    let report = replica.pack_report();
    let packed_bytes: u64 = report.kinds.iter().map(|kind| kind.bytes).sum();
    let read_rate = rate(report.read_bytes, report.seconds);
    let sent = report.sent.map_or(String::new(), |sent| {
        let (packed, sent) = (
            rate(report.read_bytes, sent.pack_seconds),
            rate(sent.bytes, sent.link_seconds),
        );
        format!("; packed at {packed:.1}, sent at {sent:.1} GB/s")
    });
    let blocks = replica.kv_blocks();
    format!(
        "{}; weights {:.1} MiB from {:.1} MiB in {:.1} s ({read_rate:.1} GB/s{sent}); KV cache {:.1} MiB, \
         {} blocks",
        replica.describe(),
        mib(packed_bytes),
        mib(report.read_bytes),
        report.seconds,
        mib(replica.kv_bytes()),
        blocks.count,
    )
}

/// GB/s; 0 if no time was measured.
fn rate(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 {
        bytes as f64 / seconds * 1e-9
    } else {
        0.0
    }
}

fn kind_line(kind: &PackedKind) -> String {
    let line = format!("{:<22} {:<12} {:>10.2} MiB", kind.name, kind.format, mib(kind.bytes));
    match &kind.remark {
        Some(remark) => format!("{line}  {remark}"),
        None => line,
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / (1 << 20) as f64
}
