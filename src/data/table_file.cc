#include "data/table_file.h"

#include "data/stored_tensor.h"

namespace lockstep::data {

std::string table_file(const std::string& path) { return checkpoint_file(path); }

void write_table(const std::string& path, const Example& table) {
  Archive archive;
  archive.tensors["x"] = to_stored(table.x);
  if (table.y.defined()) archive.tensors["y"] = to_stored(table.y);
  if (table.weight.defined()) archive.tensors["weight"] = to_stored(table.weight);
  write_archive(path, archive);
}

Example read_table(const std::string& path) {
  const Archive archive = read_archive(path);
  const auto optional = [&](const char* name) {
    return archive.tensors.contains(name) ? from_stored(archive.tensor(name)) : Tensor();
  };
  return {from_stored(archive.tensor("x")), optional("y"), optional("weight")};
}

}  // namespace lockstep::data
