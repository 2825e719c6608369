// TensorBoard's event files: TFRecords of tensorflow.Event messages.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

namespace lockstep::train {

// Appends scalars to a new file in a folder, which is made if missing. One thread. Throws IoError naming the file.
class EventFile {
 public:
  explicit EventFile(const std::string& directory);

  void scalar(const std::string& tag, std::int64_t step, double value);
  void flush();

 private:
  void record(const std::string& event);

  void open();
  bool is_there() const;

  std::string directory_;
  std::string path_;
  std::ofstream file_;
};

}  // namespace lockstep::train
