#include "data/tables.h"

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <zlib.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>

#include "base/file.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "lockstep/base/error.h"
#include "lockstep/data/dataset.h"

namespace lockstep {
namespace {

constexpr unsigned char kUint8 = 0x08;
constexpr std::int64_t kLargest = std::int64_t{1} << 40;

// Reads plain and compressed files alike, and knows where it is.
class IdxReader {
 public:
  explicit IdxReader(const std::string& path) : path_(path) {
    const auto opened = open_regular_file(path);
    const int copy = ::fcntl(opened.get(), F_DUPFD_CLOEXEC, 0);  // gzclose closes it
    file_.reset(copy < 0 ? nullptr : ::gzdopen(copy, "rb"));
    if (file_ == nullptr) throw IoError(text("cannot open ", path, ": ", std::strerror(errno)));
    ::gzbuffer(file_.get(), 1 << 17);
  }

  void read(void* to, std::int64_t bytes, const char* what) {
    while (bytes > 0) {
      const auto part = static_cast<unsigned>(std::min<std::int64_t>(bytes, 1 << 20));
      const int got = ::gzread(file_.get(), to, part);
      int status = Z_OK;
      const char* reason = ::gzerror(file_.get(), &status);
      if (got < 0 || (status != Z_OK && status != Z_STREAM_END))
        fail(text("its compressed data are damaged: ", reason));
      if (got == 0) fail(text("it ends within ", what, ": ", bytes, " bytes are missing"));
      to = static_cast<char*>(to) + got;
      bytes -= got;
      offset_ += got;
    }
  }

  bool at_end() {
    char extra = 0;
    return ::gzread(file_.get(), &extra, 1) <= 0;
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw DataError(text(path_, ", at byte ", offset_, " (uncompressed): ", what));
  }

 private:
  std::string path_;
  std::unique_ptr<gzFile_s, int (*)(gzFile)> file_{nullptr, &::gzclose};
  std::int64_t offset_ = 0;
};

std::string existing(const std::filesystem::path& directory, const char* name) {
  for (const auto& path : {directory / name, directory / text(name, ".gz")}) {
    if (checkpoint::file_exists(path)) return path.string();
  }
  throw IoError(text(directory.string(), " holds neither ", name, " nor ", name, ".gz"));
}

}  // namespace

Tensor data::read_idx(const std::string& path) {
  IdxReader reader(path);
  std::array<unsigned char, 4> magic{};
  reader.read(magic.data(), 4, "its magic number");
  if (magic[0] != 0 || magic[1] != 0 || magic[3] == 0) {
    reader.fail(text("its magic number is ", int{magic[0]}, " ", int{magic[1]}, " ", int{magic[2]}, " ", int{magic[3]},
                     "; an IDX file begins with 0 0, a type and the number of dimensions"));
  }
  if (magic[2] != kUint8)
    reader.fail(text("its elements have type ", int{magic[2]}, "; only unsigned bytes (8) are read"));

  std::vector<std::int64_t> sizes;
  std::int64_t total = 1;
  for (int i = 0; i < magic[3]; ++i) {
    std::array<unsigned char, 4> size{};
    reader.read(size.data(), 4, "its sizes");
    sizes.push_back(std::int64_t{size[0]} << 24 | size[1] << 16 | size[2] << 8 | size[3]);
    if (sizes.back() != 0 && total > kLargest / sizes.back()) reader.fail("its sizes are larger than any data set");
    total *= sizes.back();
  }

  // Memory grows with the data that is read, so that false sizes in the header allocate nothing.
  std::vector<unsigned char> bytes;
  while (static_cast<std::int64_t>(bytes.size()) < total) {
    const auto have = bytes.size();
    const auto part = std::min<std::int64_t>(total - static_cast<std::int64_t>(have),
                                             std::max<std::int64_t>(1 << 20, static_cast<std::int64_t>(have)));
    bytes.resize(have + static_cast<std::size_t>(part));
    reader.read(bytes.data() + have, part, "its elements");
  }
  if (!reader.at_end()) reader.fail(text("more bytes follow than its sizes ", at::IntArrayRef(sizes), " say"));
  auto tensor = at::empty(sizes, at::kByte);
  if (total > 0) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

namespace datasets {

TrainTest mnist(const std::string& directory) {
  const auto load = [&](const char* images_name, const char* labels_name) {
    const auto images = existing(directory, images_name);
    return Dataset::from_idx(images, existing(directory, labels_name));
  };
  auto train = load("train-images-idx3-ubyte", "train-labels-idx1-ubyte");
  return {std::move(train), load("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")};
}

TrainTest fashion_mnist() {
  constexpr const char* kDirectory = "/usr/share/datasets/fashion-mnist";
  if (!checkpoint::file_exists(kDirectory)) {
    throw IoError(
        text("Fashion-MNIST is not installed in ", kDirectory, "; install Debian's package dataset-fashion-mnist"));
  }
  return mnist(kDirectory);
}

}  // namespace datasets

}  // namespace lockstep
