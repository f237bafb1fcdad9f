#include "settings.h"

#include <algorithm>
#include <cstdlib>

namespace emulator {
namespace {

std::string text(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? value : otherwise;
}
int number(const char* name, int otherwise) {
  const std::string value = text(name, "");
  return value.empty() ? otherwise : std::atoi(value.c_str());
}

Settings read() {
  Settings made;
  made.arch = text("HIP_EMULATOR_ARCH", "gfx90a:sramecc+:xnack-");
  made.target = made.arch.substr(0, made.arch.find(':'));
  made.devices = number("HIP_EMULATOR_DEVICES", 1);
  made.memory = static_cast<u64>(number("HIP_EMULATOR_MEMORY_MIB", 1024)) << 20;
  made.units = number("HIP_EMULATOR_UNITS", 0);
  const std::string order = text("HIP_EMULATOR_ORDER", "forward");
  made.order = order == "forward" ? Order::FORWARD : order == "backward" ? Order::BACKWARD : Order::RANDOM;
  made.seed = std::strtoull(order.c_str(), nullptr, 0);
  made.caches = number("HIP_EMULATOR_CACHES", 0) != 0;
  made.residents = static_cast<u32>(std::max(1, number("HIP_EMULATOR_RESIDENT", 1)));
  made.together = number("HIP_EMULATOR_TOGETHER", 0) != 0;
  made.ticks = static_cast<u64>(number("HIP_EMULATOR_TICKS", 0));
  made.objdump = text("HIP_EMULATOR_OBJDUMP", "llvm-objdump-22");
  made.report = text("HIP_EMULATOR_REPORT", "");
  made.version = number("HIP_EMULATOR_VERSION", 60'200'000);
  made.refuse = number("HIP_EMULATOR_REFUSE", 0);
  made.invalidate = number("HIP_EMULATOR_INVALIDATE", 0);
  made.drop = number("HIP_EMULATOR_DROP", 0);
  made.link = text("HIP_EMULATOR_LINK", "");
  return made;
}

}  // namespace

const Settings& settings() {
  static const auto* all = new Settings(read());
  return *all;
}

}  // namespace emulator
