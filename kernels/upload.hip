// upload: copies the step's plan from pinned host memory to the device addresses that the step's kernels read.
//
// A graph's kernels have fixed arguments, so this one counts the steps itself (`turn`) and reads the host's copies in
// turn. `turn` points to two numbers that start as zeros: the copy to read, and how many blocks of this launch are
// done. A plan of 100 KB takes two PCIe round trips, one for the section list and one for all pieces at once, and 2 us
// of transfer. So threads copy pieces of 16 bytes from all sections at once.
//
// Grid: any number of blocks; launches.rs says how many.
#include "catalogue.h"
#include "gpu/math.h"

enum { THREADS = UPLOAD_THREADS, LIST_PIECES = (int)(sizeof(UploadList) / UPLOAD_PIECE) };
static_assert(sizeof(Piece) == UPLOAD_PIECE && sizeof(UploadList) % UPLOAD_PIECE == 0, "read in pieces");

// Loads 16 bytes, bypassing the caches, which may hold the memory's old content.
DEV Piece load_host(const void* at) {
#if defined(__CUDACC__)
  Piece v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
#else
  return *(const volatile Piece*)at;
#endif
}

// Copies one piece; pieces are numbered through all sections. False after the last one.
DEV bool copy_piece(const UploadList& list, unsigned piece, const u8* host, u8* device) {
  for (unsigned i = 0; i < list.sections; i++) {
    const UploadSection& section = list.section[i];
    if (piece < section.bytes / UPLOAD_PIECE) {
      *(Piece*)(device + section.to + piece * UPLOAD_PIECE) = load_host(host + section.from + piece * UPLOAD_PIECE);
      return true;
    }
    piece -= section.bytes / UPLOAD_PIECE;
  }
  return false;
}

KERNEL(upload, UploadArgs, THREADS, 1, 1) {
  SHARED UploadList list __attribute__((aligned(16)));
  after_predecessor();
  let_successor_start();
  const unsigned turn = a.turn[0];
  const u8* host = a.host + (i64)turn * a.copy_bytes;
  if (TID < LIST_PIECES) ((Piece*)&list)[TID] = load_host(host + TID * UPLOAD_PIECE);
  barrier();
  for (unsigned piece = BID * THREADS + TID; copy_piece(list, piece, host, a.device);) piece += GRID * THREADS;
  barrier();
  // The last block to arrive knows that all blocks have read the turn.
  if (TID == 0 && atomic_add((int*)a.turn + 1, 1) == GRID - 1) {
    a.turn[1] = 0;
    a.turn[0] = turn + 1 == a.copies ? 0 : turn + 1;
  }
}
