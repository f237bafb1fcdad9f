/* ThreadSanitizer knows no fences, and Rust's `Arc` has one: its owners release it with a subtraction, and the last one
 * fences before it drops what they have used. Linked with --wrap=__tsan_atomic64_fetch_sub, every such subtraction
 * acquires what the others have released. */
#include <stdint.h>

enum { RELEASE = 3, ACQUIRE_RELEASE = 4 };

int64_t __real___tsan_atomic64_fetch_sub(volatile int64_t *number, int64_t less, int order);

int64_t __wrap___tsan_atomic64_fetch_sub(volatile int64_t *number, int64_t less, int order) {
    return __real___tsan_atomic64_fetch_sub(number, less, order == RELEASE ? ACQUIRE_RELEASE : order);
}
