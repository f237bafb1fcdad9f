#include "caches.h"

#include <algorithm>

#include "settings.h"

namespace emulator {
namespace {

u8* memory(u64 address) { return reinterpret_cast<u8*>(address); }

// Calls a function with each part of an access that lies in one line: where the line begins, where in it the part
// begins, how long that is, and where it is in the access.
template <class Function>
void each_line(u64 address, u32 bytes, Function f) {
  for (u32 done = 0; done < bytes;) {
    const u64 at = (address + done) % LINE;
    const u32 part = static_cast<u32>(std::min(u64{bytes} - done, LINE - at));
    f(address + done - at, at, part, done);
    done += part;
  }
}

}  // namespace

Line& Cache::line(u64 from) {
  if (from != last_from_) {
    last_ = &lines_[from];
    last_from_ = from;
  }
  return *last_;
}

Line* Cache::find(u64 from) {
  const auto found = lines_.find(from);
  return found == lines_.end() ? nullptr : &found->second;
}

void Cache::invalidate() {
  for (auto entry = lines_.begin(); entry != lines_.end();) {
    entry->second.filled = false;
    entry = entry->second.dirty.none() ? lines_.erase(entry) : std::next(entry);
  }
  last_from_ = ~u64{0};
}

bool Cache::write_back() {
  bool any = false;
  for (auto& [from, line] : lines_) {
    if (line.dirty.none()) continue;
    any = true;
    for (u64 i = 0; i < LINE; i++) {
      if (line.dirty[i]) memory(from)[i] = line.bytes[i];
    }
    line.dirty.reset();
  }
  return any;
}

Line& View::line_of_die(u64 from) {
  Line& line = die_->line(from);
  if (!line.filled) {
    for (u64 i = 0; i < LINE; i++) {
      if (!line.dirty[i]) line.bytes[i] = memory(from)[i];
    }
    line.filled = true;
  }
  return line;
}

Line& View::line_of(Cache& cache, u64 from) {
  Line& line = cache.line(from);
  if (!line.filled) {
    std::memcpy(line.bytes, line_of_die(from).bytes, LINE);
    line.filled = true;
  }
  return line;
}

void View::load(u64 address, u32 bytes, Scope scope, u8* to) {
  each_line(address, bytes, [&](u64 from, u64 at, u32 part, u32 done) {
    if (scope < Scope::DEVICE) {
      std::memcpy(to + done, line_of(*unit_, from).bytes + at, part);
      return;
    }
    std::memcpy(to + done, memory(from + at), part);
    const Line* stored = die_->find(from);
    if (!stored || stored->dirty.none()) return;
    for (u64 i = 0; i < part; i++) {
      if (stored->dirty[at + i]) to[done + i] = stored->bytes[at + i];
    }
  });
}

void View::load_scalars(u64 address, u32 bytes, u8* to) {
  each_line(address, bytes, [&](u64 from, u64 at, u32 part, u32 done) {
    std::memcpy(to + done, line_of(*scalars_, from).bytes + at, part);
  });
}

void View::store_near(u64 address, u32 bytes, const u8* from) {
  each_line(address, bytes, [&](u64 begin, u64 at, u32 part, u32 done) {
    std::memcpy(line_of(*unit_, begin).bytes + at, from + done, part);
  });
}

void View::store_far(u64 address, u32 bytes, Scope scope, const u8* from) {
  each_line(address, bytes, [&](u64 begin, u64 at, u32 part, u32 done) {
    // L1 may have lost it, and taken the line anew.
    if (Line* near = unit_->find(begin)) std::memcpy(near->bytes + at, from + done, part);
    Line& line = line_of_die(begin);
    std::memcpy(line.bytes + at, from + done, part);
    for (u64 i = at; i < at + part; i++) line.dirty[i] = scope < Scope::DEVICE;
    if (scope >= Scope::DEVICE) std::memcpy(memory(begin + at), from + done, part);
  });
}

void View::invalidate(Scope scope) {
  if (scope >= Scope::BLOCK) unit_->invalidate();
  if (scope >= Scope::DEVICE) die_->invalidate();
}

Stores::Stores(u64 seed)
    : late_(settings().order == Order::BACKWARD), random_(static_cast<std::minstd_rand::result_type>(seed)) {}

void Stores::begin() {
  begun_++;
  if (settings().order == Order::RANDOM) late_ = random_() / 2 % 2 == 1;
}

void Stores::store(View& view, u64 address, u32 bytes, Scope scope, const u8* from) {
  view.store_near(address, bytes, from);
  if (!late_) return view.store_far(address, bytes, scope, from);
  stores_.push_back({address, begun_, bytes, scope, {}});
  std::memcpy(stores_.back().data, from, bytes);
}

void Stores::wait(View& view, u64 most) {
  size_t done = 0;
  for (; done < stores_.size() && stores_[done].begun + most <= begun_; done++) {
    const Store& one = stores_[done];
    view.store_far(one.address, one.bytes, one.scope, one.data);
  }
  stores_.erase(stores_.begin(), stores_.begin() + static_cast<std::ptrdiff_t>(done));
}

}  // namespace emulator
