// The command line of an example:
//   Arguments arguments("Trains a small network");
//   arguments.option("--epochs", epochs, "passes over the data").from(1);
//   arguments.flag("--elastic", elastic, "goes on without ranks that are lost");
//   arguments.parse(argc, argv);
// A user writes --epochs 3 or --epochs=3, and --elastic. --help prints each name with its default and its text.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

// An option sets this variable, whose value before parse is the default. The variable must outlive parse.
using OptionTarget = std::variant<bool*, int*, unsigned*, std::int64_t*, std::uint64_t*, double*, std::string*,
                                  std::vector<std::string>*>;

class Option {
 public:
  Option(std::string name, OptionTarget target, std::string text)
      : name_(std::move(name)), target_(target), text_(std::move(text)) {}

  Option& required() { return required_ = true, *this; }
  Option& from(double least, double most = std::numeric_limits<double>::infinity()) {
    return least_ = least, most_ = most, *this;
  }
  Option& one_of(std::vector<std::string> words) { return words_ = std::move(words), *this; }

  const std::string& name() const { return name_; }
  bool is_flag() const { return std::holds_alternative<bool*>(target_); }
  bool is_words() const { return std::holds_alternative<std::vector<std::string>*>(target_); }

  // Throws std::invalid_argument where the value is not allowed, or a second one.
  void set(const std::string& value) {
    if (given_ && !is_words()) throw std::invalid_argument(name_ + " is given twice");
    given_ = true;
    std::visit([&](auto* target) { assign(*target, value); }, target_);
  }

  void check_given() const {
    if (required_ && !given_) throw std::invalid_argument(name_ + " is required");
  }

  std::string describe() const {
    std::ostringstream line;
    line << "  " << name_ << (is_flag() || is_words() ? "" : " VALUE");
    std::visit([&](const auto* target) { print_default(line, *target); }, target_);
    line << (required_ ? " (required)" : "") << (text_.empty() ? "" : ": ") << text_;
    if (!words_.empty()) line << "; one of " << list_of_words();
    return line.str();
  }

 private:
  void assign(bool& target, const std::string&) { target = true; }
  void assign(std::vector<std::string>& target, const std::string& value) { target.push_back(value); }
  void assign(std::string& target, const std::string& value) {
    if (!words_.empty() && std::find(words_.begin(), words_.end(), value) == words_.end())
      throw std::invalid_argument(name_ + " '" + value + "': must be one of " + list_of_words());
    target = value;
  }
  template <class Number>
  void assign(Number& target, const std::string& value) {
    Number number{};
    const auto* const end = value.data() + value.size();
    const auto [stop, error] = std::from_chars(value.data(), end, number);
    const auto least = std::max<double>(least_, limit<Number>(false)), most = std::min(most_, limit<Number>(true));
    if (const auto n = static_cast<double>(number); error != std::errc() || stop != end || !(n >= least && n <= most)) {
      std::ostringstream message;
      message.precision(20);
      message << name_ << " '" << value << "': must be a " << (std::is_integral_v<Number> ? "whole " : "")
              << "number from " << least << " to " << most;
      throw std::invalid_argument(message.str());
    }
    target = number;
  }
  template <class Number>
  static double limit(bool most) {
    using Limits = std::numeric_limits<Number>;
    if constexpr (Limits::has_infinity) return most ? Limits::infinity() : -Limits::infinity();
    return static_cast<double>(most ? Limits::max() : Limits::lowest());
  }

  static void print_default(std::ostream& line, const std::string& value) {
    if (!value.empty()) line << " [" << value << "]";
  }
  static void print_default(std::ostream&, const std::vector<std::string>&) {}
  static void print_default(std::ostream&, const bool&) {}
  template <class Number>
  static void print_default(std::ostream& line, const Number& value) {
    line << " [" << value << "]";
  }

  std::string list_of_words() const {
    std::string list;
    for (const auto& word : words_) list += (list.empty() ? "" : ", ") + word;
    return list;
  }

  std::string name_;
  OptionTarget target_;
  std::string text_;
  std::vector<std::string> words_;  // that a text may be; none: any
  double least_ = -std::numeric_limits<double>::infinity(), most_ = std::numeric_limits<double>::infinity();
  bool required_ = false, given_ = false;
};

class Arguments {
 public:
  explicit Arguments(std::string about) : about_(std::move(about)) {}

  // A reference is good until the next option is added.
  template <class T>
  Option& option(std::string name, T& target, std::string text = "") {
    return options_.emplace_back(std::move(name), &target, std::move(text));
  }
  Option& flag(std::string name, bool& target, std::string text = "") {
    return option(std::move(name), target, std::move(text));
  }
  // Arguments between the options, in their order.
  Option& words(std::string name, std::vector<std::string>& target, std::string text = "") {
    return option(std::move(name), target, std::move(text));
  }

  // Sets what the arguments name. After --help the program ends with status 0. After an argument that is unknown or not
  // allowed the program ends with a line that names the argument, and status 2.
  void parse(int argc, const char* const* argv) {
    try {
      if (read({argv + 1, argv + argc})) return;
      std::cout << help();
    } catch (const std::invalid_argument& error) {
      std::cerr << argv[0] << ": " << error.what() << "; see --help\n";
      std::exit(2);
    }
    std::exit(0);
  }

  std::string help() const {
    std::string text = about_ + "\n";
    for (const auto& each : options_) text += each.describe() + "\n";
    return text;
  }

  // The part of parse that does not end the program. Returns false after --help. Throws std::invalid_argument for an
  // argument that is unknown or not allowed.
  bool read(const std::vector<std::string>& arguments) {
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const auto& argument = arguments[i];
      if (argument == "--help" || argument == "-h") return false;
      const auto equals = argument.find('=');
      const auto name = argument.substr(0, equals);
      auto& option = find(name);
      if (option.is_words()) {
        option.set(argument);
      } else if (equals != std::string::npos) {
        if (option.is_flag()) throw std::invalid_argument(name + " takes no value");
        option.set(argument.substr(equals + 1));
      } else if (option.is_flag()) {
        option.set("");
      } else if (++i < arguments.size()) {
        option.set(arguments[i]);
      } else {
        throw std::invalid_argument(name + " needs a value");
      }
    }
    for (const auto& each : options_) each.check_given();
    return true;
  }

 private:
  Option& find(const std::string& name) {
    const bool word = name.empty() || name[0] != '-';
    for (auto& each : options_) {
      if (word ? each.is_words() : each.name() == name) return each;
    }
    throw std::invalid_argument("unknown argument '" + name + "'");
  }

  std::string about_;
  std::vector<Option> options_;
};
