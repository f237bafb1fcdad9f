// Vector comparisons: a bit for each lane.
#include "lanes.h"

namespace emulator {
namespace {

template <class T>
void add_orders(std::vector<Row>& rows, const std::string& type) {
  rows.push_back({"v_cmp_lt_" + type, condition([](T a, T b) { return a < b; })});
  rows.push_back({"v_cmp_eq_" + type, condition([](T a, T b) { return a == b; })});
  rows.push_back({"v_cmp_le_" + type, condition([](T a, T b) { return a <= b; })});
  rows.push_back({"v_cmp_gt_" + type, condition([](T a, T b) { return a > b; })});
  rows.push_back({"v_cmp_ge_" + type, condition([](T a, T b) { return a >= b; })});
}

template <class T>
void add_integers(std::vector<Row>& rows, const std::string& type) {
  add_orders<T>(rows, type);
  rows.push_back({"v_cmp_ne_" + type, condition([](T a, T b) { return a != b; })});
}

// Of floats; what begins with an n is also true of a NaN.
template <class T>
void add_floats(std::vector<Row>& rows, const std::string& type) {
  add_orders<T>(rows, type);
  rows.push_back({"v_cmp_lg_" + type, condition([](T a, T b) { return a < b || a > b; })});
  rows.push_back({"v_cmp_o_" + type, condition([](T a, T b) { return !std::isnan(a) && !std::isnan(b); })});
  rows.push_back({"v_cmp_u_" + type, condition([](T a, T b) { return std::isnan(a) || std::isnan(b); })});
  rows.push_back({"v_cmp_nge_" + type, condition([](T a, T b) { return !(a >= b); })});
  rows.push_back({"v_cmp_nlg_" + type, condition([](T a, T b) { return !(a < b || a > b); })});
  rows.push_back({"v_cmp_ngt_" + type, condition([](T a, T b) { return !(a > b); })});
  rows.push_back({"v_cmp_nle_" + type, condition([](T a, T b) { return !(a <= b); })});
  rows.push_back({"v_cmp_neq_" + type, condition([](T a, T b) { return !(a == b); })});
  rows.push_back({"v_cmp_nlt_" + type, condition([](T a, T b) { return !(a < b); })});
}

// Whether it is of one of the classes whose bits are set: NaNs in bits 0 and 1, then from -infinity to +infinity.
template <class T>
bool is_of_class(T a, u32 classes) {
  constexpr u64 QUIET = sizeof(T) == 4 ? u64{1} << 22 : u64{1} << 51;
  u64 bits = 0;
  std::memcpy(&bits, &a, sizeof a);
  if (std::isnan(a)) return classes & (bits & QUIET ? 2 : 1);
  const int size = std::isinf(a) ? 3 : a == 0 ? 0 : subnormal(a) ? 1 : 2;
  return classes >> (std::signbit(a) ? 5 - size : 6 + size) & 1;
}

}  // namespace

std::vector<Group> compare_instructions() {
  std::vector<Row> rows;
  add_integers<i16>(rows, "i16");
  add_integers<u16>(rows, "u16");
  add_integers<i32>(rows, "i32");
  add_integers<u32>(rows, "u32");
  add_integers<i64>(rows, "i64");
  add_integers<u64>(rows, "u64");
  add_floats<f32>(rows, "f32");
  add_floats<f64>(rows, "f64");
  rows.push_back({"v_cmp_class_f32", condition([](f32 a, u32 b) { return is_of_class(a, b); })});
  rows.push_back({"v_cmp_class_f64", condition([](f64 a, u32 b) { return is_of_class(a, b); })});
  return {{"AMD Instinct MI200 ISA, 12: VOPC", rows}};
}

}  // namespace emulator
