#include "checkpoint/state.h"

#include <memory>
#include <span>

#include "checkpoint/files.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/base/error.h"

namespace lockstep::checkpoint {

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : name.empty() ? prefix : prefix + "/" + name;
}

Trackable compose(Parts parts) {
  Trackable state;
  for (const auto& [name, part] : parts) {
    if (part.ranks.size() > 1) state.ranks = part.ranks;
  }
  const auto all = std::make_shared<const Parts>(std::move(parts));
  state.save = [all](Archive& archive, const std::string& prefix) {
    for (const auto& [name, part] : *all) part.save(archive, joined(prefix, name));
  };
  state.load = [all](const Archive& archive, const std::string& prefix) -> std::function<void()> {
    std::vector<std::function<void()>> changes;
    for (const auto& [name, part] : *all) changes.push_back(part.load(archive, joined(prefix, name)));
    return [changes] {
      for (const auto& change : changes) change();
    };
  };
  return state;
}

Archive archive_of(const Trackable& state) {
  Archive archive;
  state.save(archive, "");
  return archive;
}

std::string print_state(const Trackable& state) { return print_archive(archive_of(state)); }

std::function<void()> parse_state(const std::string& from, std::string_view printed, const Trackable& state) {
  return state.load(parse_archive(from, std::as_bytes(std::span(printed))), "");
}

Archive from_rank_0(const std::string& name, Archive archive, const Communicator& ranks) {
  if (ranks.size() == 1) return archive;
  const auto printed = ranks.broadcast(ranks.rank() == 0 ? print_archive(archive) : "");
  return ranks.rank() == 0 ? archive : parse_archive(name, std::as_bytes(std::span(printed)));
}

Archive read_for_all(const std::string& path, const Communicator& ranks) {
  const auto file = checkpoint_file(path);
  std::string bytes;
  ranks.run_on_rank_0([&] {
    if (path.empty()) {
      throw InvalidArgument(
          "the path of the checkpoint is empty: latest_checkpoint returns \"\" where its folder has no checkpoint");
    }
    const auto read = read_file(file);
    bytes.assign(reinterpret_cast<const char*>(read.data()), read.size());
    if (file_exists(rows_folder(file))) bytes = print_archive(ShardedArchive(file).whole());
  });
  bytes = ranks.broadcast(bytes);
  return parse_archive(file, std::as_bytes(std::span(bytes)));
}

}  // namespace lockstep::checkpoint
