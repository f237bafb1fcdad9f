#include "table.h"

#include <unordered_map>

namespace emulator {
namespace {

const std::unordered_map<std::string, Row>& rows() {
  static const auto* all = [] {
    auto* made = new std::unordered_map<std::string, Row>;
    for (auto* instructions :
         {scalar_instructions, vector_instructions, compare_instructions, packed_instructions, memory_instructions}) {
      for (const Group& group : instructions()) {
        for (const Row& row : group.rows) {
          if (!made->emplace(row.name, row).second) throw std::logic_error("twice in the table: " + row.name);
        }
      }
    }
    return made;
  }();
  return *all;
}

bool is_on(const Row& row, const std::string& target) {
  return !row.only_on || std::strstr(row.only_on, target.c_str());
}

}  // namespace

const Row* find_row(const std::string& name, const std::string& target) {
  const auto found = rows().find(name);
  return found != rows().end() && is_on(found->second, target) ? &found->second : nullptr;
}

std::vector<std::string> names_of_rows(const std::string& target) {
  std::vector<std::string> names;
  for (const auto& [name, row] : rows()) {
    if (is_on(row, target)) names.push_back(name);
  }
  return names;
}

}  // namespace emulator
