//! kernels/wire.h has the bytes of weights where the host's `RowMajor` puts them.

use super::build;
use getp::dtype::MXFP4_BLOCK;
use getp::weights::{Layout, RowMajor, Rows, WeightFormat};
use std::process::Command;

const COLS: [usize; 5] = [32, 64, 96, 2880, 4096];

/// Prints, for each number of columns, the bytes of a tile, and the offsets of each row's codes and scales; then rows
/// rounded up to whole tiles.
const PROGRAM: &str = r#"
#include "wire.h"
#include <cstdio>
#include <initializer_list>
int main() {
  for (int cols : {COLS}) {
    const WireCodes wire{cols};
    printf("%lld\n", wire.tile_bytes());
    for (int row = 0; row < WIRE_ROWS; row++)
      for (int k = 0; k < cols; k++) printf("%lld %lld\n", wire.code(row, k), wire.scale(row, k));
  }
  for (int rows = 0; rows < 200; rows++) printf("%d\n", wire_rows(rows));
  return 0;
}
"#;

/// Which of the codes and then of the scales of a tile each of its bytes is: a tile is written once for each digit of
/// their numbers.
fn bytes_of_tile(cols: usize) -> Vec<usize> {
    let (codes, scales) = (RowMajor::ROWS * cols / 2, RowMajor::ROWS * cols / MXFP4_BLOCK);
    let mut which = vec![0; RowMajor.tile_bytes(WeightFormat::Mxfp4, cols)];
    for digit in 0..3 {
        let digits: Vec<u8> = (0..codes + scales).map(|i| (i >> (8 * digit)) as u8).collect();
        let (codes, scales) = digits.split_at(codes);
        let mut tile = vec![0; which.len()];
        RowMajor.write(Rows::Mxfp4 { codes, scales }, cols, &mut tile);
        which
            .iter_mut()
            .zip(tile)
            .for_each(|(which, byte)| *which |= usize::from(byte) << (8 * digit));
    }
    which
}

#[test]
fn kernels_find_weights_where_the_host_puts_them() {
    let source = PROGRAM.replace("COLS", &COLS.map(|cols| cols.to_string()).join(", "));
    build("cpp", &source, &[], |program| {
        let output = Command::new(program).output().unwrap();
        assert!(output.status.success());
        let printed = String::from_utf8(output.stdout).unwrap();
        let mut lines = printed.lines().map(|line| {
            let numbers = line.split(' ').map(|number| number.parse::<usize>().unwrap());
            numbers.collect::<Vec<_>>()
        });
        for cols in COLS {
            let which = bytes_of_tile(cols);
            assert_eq!(lines.next(), Some(vec![which.len()]), "{cols} columns");
            let (codes, scales) = (cols / 2, cols / MXFP4_BLOCK);
            for row in 0..RowMajor::ROWS {
                for k in 0..cols {
                    let found: Vec<_> = lines.next().unwrap().into_iter().map(|at| which[at]).collect();
                    let scale = RowMajor::ROWS * codes + row * scales + k / MXFP4_BLOCK;
                    assert_eq!(
                        found,
                        [row * codes + k / 2, scale],
                        "{cols} columns, row {row}, column {k}"
                    );
                }
            }
        }
        for rows in 0..200 {
            let tiles = RowMajor.bytes(WeightFormat::Bf16, rows, 1) / RowMajor.tile_bytes(WeightFormat::Bf16, 1);
            assert_eq!(lines.next(), Some(vec![tiles * RowMajor::ROWS]), "{rows} rows");
        }
        assert_eq!(lines.next(), None);
    });
}
