#include "checkpoint/safetensors.h"

#include <algorithm>

#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/own_files.h"
#include "checkpoint/sharded_archive.h"
#include "checkpoint/streamed_archive.h"
#include "lockstep/base/error.h"

namespace lockstep::checkpoint {
namespace fs = std::filesystem;

namespace {

std::int64_t rows_in(const TensorInfo& tensor) { return tensor.shape.empty() ? 1 : tensor.shape[0]; }

class Surveyor {
 public:
  explicit Surveyor(const std::string& path) : path_(path), file_(checkpoint_file(path)) {}

  Survey run() {
    const ArchiveReader main(path_);
    found_.entries = main.header().entries;
    for (const auto& tensor : main.header().tensors) found_.tensors[tensor.name] = tensor.info;
    for (const auto& [tensor, parts] : listed_rows(path_, found_.entries)) add_rows(tensor, parts);
    if (found_.entries.contains(kTablesFolder)) add_tables();
    for (const auto& [key, place] : found_.entries) {
      if (key.ends_with(kListedFiles) && has_random_form(place.substr(0, place.find('/')))) {
        add_object(key.substr(0, key.size() - std::string(kListedFiles).size()), place);
      }
    }
    return std::move(found_);
  }

 private:
  [[noreturn]] void fail(const fs::path& file, const std::string& what) const {
    throw DataError(text(file_, " is not a whole checkpoint: ", file.string(), " ", what));
  }

  const Header& header_of(const fs::path& file) {
    if (const auto known = headers_.find(file); known != headers_.end()) return known->second;
    if (!file_exists(file)) fail(file, "is not there");
    found_.files.insert(file);
    return headers_[file] = ArchiveReader(file.string()).header();
  }

  void add_rows(const std::string& tensor, const std::vector<ListedRows>& parts) {
    const auto before = found_.tensors.find(tensor);
    auto rows = before == found_.tensors.end() ? 0 : rows_in(before->second);
    for (const auto& part : parts) {
      const auto& all = header_of(part.file).tensors;
      const auto stored =
          std::find_if(all.begin(), all.end(), [&](const auto& each) { return each.name == part.name; });
      if (stored == all.end()) fail(part.file, text("has no ", part.name));
      if (rows_in(stored->info) != part.end - part.begin) {
        fail(part.file, text("has ", rows_in(stored->info), " rows of ", part.name));
      }
      if (part.begin > rows)
        fail(part.file, text("begins at row ", part.begin, " of ", tensor, ", and row ", rows, " is missing"));
      rows = std::max(rows, part.end);
      auto& info = found_.tensors[tensor];
      info = stored->info;
      if (!info.shape.empty()) info.shape[0] = rows;
    }
  }

  void add_tables() {
    const auto folder = path_inside(rows_folder(path_), found_.entries.at(kTablesFolder));
    const auto written = found_.entries.find(kTablesServers);
    const auto servers = written == found_.entries.end() ? std::nullopt : whole_number<int>(written->second);
    if (folder.empty() || !servers || *servers < 1) fail(folder, "is no folder with tables");
    for (int server = 0; server < *servers; ++server) {
      for (const auto& tensor : header_of(tables_file(folder / name_of_part("ps", server, *servers))).tensors) {
        const auto [known, is_new] = found_.tensors.emplace(tensor.name, tensor.info);
        if (!is_new && !tensor.info.shape.empty()) known->second.shape.at(0) += rows_in(tensor.info);
      }
    }
  }

  // An object that has files of its own: a checkpoint in PATH.rows.
  void add_object(const std::string& object, const std::string& place) {
    const auto path = path_inside(rows_folder(path_), place);
    if (path.empty()) fail(place, "is no file of its own");
    if (!file_exists(checkpoint_file(path.string()))) fail(checkpoint_file(path.string()), "is not there");
    const auto theirs = survey(path.string());
    for (const auto& [name, info] : theirs.tensors) found_.tensors[text(object, "/", name)] = info;
    found_.files.insert(checkpoint_file(path.string()));
    found_.files.insert(theirs.files.begin(), theirs.files.end());
  }

  const std::string path_, file_;
  Survey found_;
  std::map<fs::path, Header> headers_;
};

}  // namespace

Survey survey(const std::string& path) { return Surveyor(path).run(); }

}  // namespace lockstep::checkpoint
