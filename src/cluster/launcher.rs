//! How this process was started, from its environment.

/// How this process was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartedBy {
    /// By itself, or as the only process.
    Alone,
    /// With others, by a launcher that MPI finds them through: so many processes in all, if that is known.
    Together(Option<usize>),
    /// With so many others by srun, which was not told to serve MPI: they cannot find each other.
    WithoutMpi(usize),
}

/// The numbers of processes that mpirun (Open MPI; MPICH, Intel MPI, Slurm's PMI-2; MVAPICH) gives.
const SIZES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"];

/// What a launcher sets through which MPI finds the others, without their number.
const CONTACTS: [&str; 5] = ["PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_CONTROL_PORT", "PALS_RANKID"];

/// Whether mpirun or srun has started the process with this environment, be it alone or with others. They may forward
/// its stdout, and Open MPI does so through a terminal that nobody sits at.
pub fn is_launched(is_set: impl Fn(&str) -> bool) -> bool {
    signs().any(is_set)
}

/// The variables that [`is_launched`] looks for.
pub fn signs() -> impl Iterator<Item = &'static str> {
    SIZES.into_iter().chain(CONTACTS)
}

/// How the process with this environment was started.
///
/// `SLURM_NTASKS` says nothing: a shell in an allocation has it, too. `SLURM_STEP_NUM_TASKS` is set by srun alone.
pub fn started_by(variable: impl Fn(&str) -> Option<String>) -> StartedBy {
    let number = |name: &str| variable(name)?.trim().parse::<usize>().ok();
    let step = variable("SLURM_PROCID").and_then(|_| number("SLURM_STEP_NUM_TASKS"));
    if let Some(size) = SIZES.into_iter().find_map(number) {
        return match size {
            0 | 1 => StartedBy::Alone,
            _ => StartedBy::Together(Some(size)),
        };
    }
    let has_contact = CONTACTS.into_iter().any(|name| variable(name).is_some());
    match step {
        Some(0 | 1) => StartedBy::Alone,
        _ if has_contact => StartedBy::Together(step),
        Some(others) => StartedBy::WithoutMpi(others),
        None => StartedBy::Alone,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_of_its_own_is_launched_all_the_same() {
        for (set, launched) in [
            ("OMPI_COMM_WORLD_SIZE", true),
            ("PMIX_RANK", true),
            ("SLURM_NTASKS", false),
        ] {
            assert_eq!(is_launched(|name| name == set), launched, "{set}");
        }
    }

    #[test]
    fn only_a_launchers_processes_are_ranks() {
        let cases: [(&[(&str, &str)], StartedBy); 13] = [
            (&[], StartedBy::Alone),
            (
                &[("OMPI_COMM_WORLD_SIZE", "4"), ("PMIX_RANK", "0")],
                StartedBy::Together(Some(4)),
            ),
            (&[("OMPI_COMM_WORLD_SIZE", "1"), ("PMIX_RANK", "0")], StartedBy::Alone),
            (
                &[("PMI_SIZE", "2"), ("PMI_RANK", "1"), ("PMI_FD", "7")],
                StartedBy::Together(Some(2)),
            ),
            (&[("PMI_SIZE", "1")], StartedBy::Alone),
            (&[("MV2_COMM_WORLD_SIZE", "2")], StartedBy::Together(Some(2))),
            // Shells of salloc and sbatch.
            (&[("SLURM_NTASKS", "16"), ("SLURM_JOB_ID", "7")], StartedBy::Alone),
            (&[("SLURM_NTASKS", "16"), ("SLURM_PROCID", "0")], StartedBy::Alone),
            (
                &[("SLURM_STEP_NUM_TASKS", "16"), ("SLURM_PROCID", "3")],
                StartedBy::WithoutMpi(16),
            ),
            (
                &[
                    ("SLURM_STEP_NUM_TASKS", "16"),
                    ("SLURM_PROCID", "3"),
                    ("PMIX_RANK", "3"),
                ],
                StartedBy::Together(Some(16)),
            ),
            (
                &[("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0"), ("PMIX_RANK", "0")],
                StartedBy::Alone,
            ),
            (&[("PMIX_RANK", "3")], StartedBy::Together(None)),
            (&[("PMI_SIZE", "none")], StartedBy::Alone),
        ];
        for (environment, expected) in cases {
            let variable = |name: &str| {
                let set = environment.iter().find(|(set, _)| *set == name);
                set.map(|(_, value)| (*value).to_owned())
            };
            assert_eq!(started_by(variable), expected, "{environment:?}");
        }
    }
}
