// Sends what a process of the job may send to a parameter server or to the chief: a request, and bulk data after it.
#include <fuzzer/FuzzedDataProvider.h>
#include <unistd.h>

#include "parameter_server/grpc_service/engine.h"
#include "parameter_server/grpc_service/frames.h"
#include "parameter_server/served_models.h"
#include "tests/fuzz/fuzz.h"

namespace lockstep {
namespace {

using namespace grpc_service;

// Answers at once, where the chief would wait.
class ImpatientChief final : public parameter_server::ChiefService {
 public:
  std::optional<std::string> start(std::int64_t, int, const std::string& plan, Deadline) override { return plan; }
  parameter_server::Assignment next(std::int64_t, int worker, const std::optional<parameter_server::Report>& report,
                                    Deadline) override {
    return {.index = worker, .arguments = report ? report->output : ""};
  }
  bool has_begun(std::int64_t, const std::string&, Deadline) override { return true; }
  std::optional<std::string> outcome(std::int64_t, Deadline) override { return std::nullopt; }
  void join(const parameter_server::Process&) override {}
  void leave(const parameter_server::Process&) override {}
};

// A server's model with two shards and two tables, which begins anew for each input.
parameter_server::Services make_services() {
  using namespace parameter_server;
  const ModelSpec model{.variables = {{"a", DType::float32, {3, 5}}, {"b", DType::float64, {7}}},
                        .tables = {{.name = "c", .rows = 100, .width = 3},
                                   {.name = "d", .dtype = DType::float64, .rows = 1'000'000'000'000, .width = 1}}};
  const auto models = std::make_shared<ServedModels>(1);
  models->add(0, "a model",
              std::make_shared<ShardStore>(model, place_shards(model.variables, {}, 1), ServerNumber(), Adagrad(),
                                           UpdateMode{.parts = 2, .needed = 2}));
  const std::vector<std::byte> first_values(64);
  models->write(0, std::vector{first_values.data(), first_values.data()});
  return {models, std::make_shared<ImpatientChief>()};
}

CallStream given_frames(FuzzedDataProvider& data) {
  const auto read = [&data](grpc::ByteBuffer& frame) {
    if (data.remaining_bytes() == 0 || data.ConsumeIntegralInRange(0, 15) == 0) return false;
    const grpc::Slice slice(data.ConsumeRandomLengthString(1024));
    frame = grpc::ByteBuffer(&slice, 1);
    return true;
  };
  return {.read = read, .write = [](const grpc::ByteBuffer&) { return true; }, .cancelled = [] { return false; }};
}

std::int64_t number(FuzzedDataProvider& data) {
  return data.ConsumeBool() ? data.ConsumeIntegralInRange<std::int64_t>(-2, 20) : data.ConsumeIntegral<std::int64_t>();
}

std::int64_t shared_block = 0;  // the number of one that the server has

std::int64_t block(FuzzedDataProvider& data) { return data.ConsumeBool() ? shared_block : number(data); }

void fill(FuzzedDataProvider& data, Shards& shards) {
  shards.set_block(block(data));
  while (data.ConsumeBool()) shards.add_offsets(number(data));
}

void fill(FuzzedDataProvider& data, Rows& rows) {
  rows.set_count(static_cast<std::uint64_t>(number(data)));
  rows.set_block(data.ConsumeBool() ? -1 : block(data));
  rows.set_ids(number(data));
  rows.set_elements(number(data));
}

Request structured_request(FuzzedDataProvider& data) {
  Request request;
  request.set_second_copies(data.ConsumeIntegralInRange(0, 7) == 0);
  switch (data.ConsumeIntegralInRange(0, 7)) {
    case 0: {
      auto& push = *request.mutable_push();
      push.mutable_task()->set_step(number(data));
      push.mutable_task()->set_part(static_cast<std::int32_t>(number(data)));
      push.set_weight(data.ConsumeFloatingPoint<double>());
      push.set_present(data.ConsumeBool() ? std::string("\1\1") : data.ConsumeRandomLengthString(4));
      if (data.ConsumeBool()) fill(data, *push.mutable_shared());
      if (data.ConsumeBool()) push.set_learning_rate(data.ConsumeFloatingPoint<double>());
      push.set_finished(number(data));
      push.set_bfloat16(data.ConsumeBool());
      while (push.rows_size() < 2 || data.ConsumeBool()) fill(data, *push.add_rows());
      break;
    }
    case 1:
      if (data.ConsumeBool()) fill(data, *request.mutable_pull()->mutable_shared());
      while (data.ConsumeBool()) request.mutable_pull()->add_known(number(data));
      break;
    case 2:
      request.mutable_pull_rows()->set_table(static_cast<std::uint64_t>(number(data)));
      fill(data, *request.mutable_pull_rows()->mutable_rows());
      break;
    case 3: request.mutable_write(); break;
    case 4: request.mutable_cut()->set_end(number(data)); break;
    case 5: request.mutable_next()->mutable_report()->set_output_bytes(static_cast<std::uint64_t>(number(data))); break;
    case 6: request.mutable_transfer()->set_number(number(data)); break;
    default: request.ParseFromString(data.ConsumeRandomLengthString(256));
  }
  return request;
}

}  // namespace

void fuzz(const std::string& bytes) {
  FuzzedDataProvider data(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  const auto services = make_services();
  AnswerState state;
  static const auto memory = parameter_server::SharedBlock::make(4096);
  shared_block = state.blocks.add(memory);
  for (int calls = 0; calls < 4 && data.remaining_bytes() > 0; ++calls) {
    auto request = structured_request(data);
    request.set_seconds(0);
    if (request.has_save() || request.has_restore()) continue;  // files that the caller names
    if (request.has_share()) request.mutable_share()->set_process(getpid());
    if (request.has_open()) request.set_model(0);  // it would wait for others
    try {
      answer(services, state, given_frames(data), request);
    } catch (const Error&) {  // the next call meets what this one has left
    }
  }
}

}  // namespace lockstep
