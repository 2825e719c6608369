#include "parameter_server/grpc_service/engine.h"

#include <algorithm>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "parameter_server/grpc_service/frames.h"
#include "parameter_server/served_models.h"

namespace lockstep::grpc_service {
namespace {

using parameter_server::Services;
using parameter_server::ShardStore;

constexpr double kLongestWait = 600;                           // seconds that a caller may ask for
constexpr std::size_t kMostRowBytes = std::size_t{512} << 20;  // of a table's rows in one call

// One call. Throws what the services throw.
class Answer {
 public:
  Answer(const Services& services, AnswerState& state, const CallStream& stream, const Request& request)
      : services_(services),
        state_(state),
        stream_(stream),
        request_(request),
        deadline_(Deadline::after(std::chrono::duration<double>(std::clamp(request.seconds(), 0.0, kLongestWait)))) {}

  void give() {
    switch (request_.kind_case()) {
      case Request::kOpen: return open(request_.open());
      case Request::kPush: return push(request_.push());
      case Request::kPull: return pull(request_.pull());
      case Request::kPullRows: return pull_rows(request_.pull_rows());
      case Request::kWrite: return write(request_.write());
      case Request::kNext: return next(request_.next());
      case Request::kHasBegun: return has_begun(request_.has_begun());
      case Request::kOutcome: return outcome(request_.outcome());
      case Request::kStay: return stay(request_.stay());
      case Request::kStart: return start(request_.start());
      case Request::kShare: return share(request_.share());
      case Request::kCut: return cut(request_.cut());
      case Request::kSave: return save(request_.save());
      case Request::kRestore: return restore(request_.restore());
      case Request::kTransfer: return transfer(request_.transfer());
      default: throw InvalidArgument("a request of a kind that this version does not know");
    }
  }

 private:
  parameter_server::ServedModels& models() const {
    const auto& models = request_.second_copies() ? services_.second_copies : services_.models;
    if (models) return *models;
    throw InvalidArgument(request_.second_copies() ? "this process has no second copies of shards"
                                                   : "this process is no parameter server");
  }
  // Waits for a model that this server has not made yet.
  parameter_server::ServedModels& models_once_made() const {
    models().wait_for(request_.model(), deadline_);
    return models();
  }
  std::shared_ptr<ShardStore> shards() const { return models_once_made().find(request_.model()); }
  parameter_server::ChiefService& chief() const {
    if (services_.chief) return *services_.chief;
    throw InvalidArgument("this process is not the chief");
  }

  // A caller waits for so long before it is told to ask again.
  static Deadline poll() { return Deadline::after(std::chrono::seconds(1)); }

  void reply(const Reply& reply = {}, const Bulk& bulk = {}) const {
    stream_.write(frame_of(reply));
    write_bulk(bulk, stream_.write);
  }

  Parts read_parts(const std::vector<std::size_t>& sizes, const std::vector<bool>& rounded = {}) const {
    return grpc_service::read_parts(sizes, rounded, state_.buffers, stream_.read);
  }

  // Throws once the caller has given up: it may then change the contents of a shared block.
  void require_caller() const {
    if (stream_.cancelled()) throw Aborted("the caller has given up");
  }

  void open(const Open& open) const {
    models().open(request_.model(), open.user(), open.description(), deadline_);
    reply();
  }

  void push(const Push& push) const {
    const auto store = shards();
    const auto shard_bytes = store->sizes().shards;
    auto sizes = shard_bytes;  // of what is sent
    if (push.present().size() != sizes.size()) {
      throw InvalidArgument(text("the push of step ", push.task().step(), " has gradients of ", push.present().size(),
                                 " shards; this server has ", sizes.size()));
    }
    const auto in_block = push.has_shared() ? shared(push.shared(), *store) : InBlock(sizes.size());
    std::vector<bool> rounded;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      rounded.push_back(push.bfloat16() && store->shard(i).dtype() == DType::float32);
      if (push.present()[i] == 0 || in_block.at[i] != nullptr) sizes[i] = 0;
    }
    if (static_cast<std::size_t>(push.rows_size()) != store->tables()) {
      throw InvalidArgument(text("the push of step ", push.task().step(), " has rows of ", push.rows_size(),
                                 " tables; this server has ", store->tables()));
    }
    std::vector<RowsInBlock> rows;
    for (std::size_t i = 0; i < store->tables(); ++i) {
      const auto& table = store->table(i).table();
      rows.push_back(find_rows(push.rows(static_cast<int>(i)), table));
      const bool sent = rows.back().block == nullptr;
      sizes.push_back(sent ? rows.back().count * sizeof(std::int64_t) : 0);
      sizes.push_back(sent ? rows.back().count * table.row_bytes() : 0);
      rounded.push_back(false);
      rounded.push_back(push.bfloat16() && table.dtype == DType::float32);
    }
    const auto received = read_parts(sizes, rounded);
    parameter_server::Push given{.task = {push.task().step(), push.task().part()}, .weight = push.weight()};
    for (std::size_t i = 0; i < shard_bytes.size(); ++i) {
      const std::byte* const gradient = in_block.at[i] != nullptr ? in_block.at[i] : received.parts[i].data();
      given.gradients.push_back(push.present()[i] == 0 ? nullptr : gradient);
    }
    bool in_blocks = in_block.block != nullptr;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto* const sent = &received.parts[shard_bytes.size() + 2 * i];
      const bool is_sent = rows[i].block == nullptr;
      given.rows.push_back(is_sent ? parameter_server::Rows{ids_in(sent[0]), sent[1].data()} : rows[i].rows());
      in_blocks = in_blocks || !is_sent;
    }
    if (!in_blocks) given.memory = received.memory;  // else the caller's, which must be copied to keep
    if (push.has_learning_rate()) given.learning_rate = push.learning_rate();
    given.chief = push.chief();
    given.finished = push.finished();
    if (in_blocks) require_caller();
    reply_transfer(store->push(std::move(given)));
  }

  void pull(const Pull& pull) const {
    const auto store = shards();
    const std::vector<std::int64_t> known(pull.known().begin(), pull.known().end());
    if (!known.empty() && known.size() != store->size()) {
      throw InvalidArgument(text("versions of ", known.size(), " shards are known; this server has ", store->size()));
    }
    auto versions = known;
    const auto read_values = [&](const std::vector<std::byte*>& values) {
      models().wait_for_values(request_.model(), deadline_)->pull(values, versions);
    };
    Bulk bulk;
    if (pull.has_shared()) {
      read_values(shared(pull.shared(), *store).at);
    } else {
      const Parts values(store->sizes().shards, state_.buffers);
      std::vector<std::byte*> shards;
      for (const auto& part : values.parts) shards.push_back(part.data());
      read_values(shards);
      bulk.owner = values.memory;
      for (std::size_t i = 0; i < shards.size(); ++i) {
        if (known.empty() || known[i] != versions[i]) bulk.parts.emplace_back(values.parts[i]);
      }
    }
    Reply answer;
    answer.mutable_versions()->Add(versions.begin(), versions.end());
    reply(answer, bulk);
  }

  void pull_rows(const PullRows& pull) const {
    const auto store = shards();
    const auto& spec = store->table(pull.table()).table();
    const auto rows = find_rows(pull.rows(), spec);
    const auto read_rows = [&](std::span<const std::int64_t> ids, std::byte* values) {
      models().wait_for_values(request_.model(), deadline_)->table(pull.table()).read(ids, values);
    };
    if (rows.block != nullptr) {
      require_caller();
      read_rows(rows.rows().ids, rows.elements);
      return reply();
    }
    const auto ids = read_parts({rows.count * sizeof(std::int64_t)});
    const Parts values({rows.count * spec.row_bytes()}, state_.buffers);
    read_rows(ids_in(ids.parts[0]), values.memory.get());
    reply({}, {.parts = {values.parts[0]}, .owner = values.memory});
  }

  // Rows that a caller has in a shared block, or sends or wants as bulk: then there is no block.
  struct RowsInBlock {
    std::size_t count = 0;
    std::shared_ptr<parameter_server::SharedBlock> block;
    const std::byte* ids = nullptr;
    std::byte* elements = nullptr;

    parameter_server::Rows rows() const { return {ids_in({ids, count * sizeof(std::int64_t)}), elements}; }
  };
  RowsInBlock find_rows(const Rows& named, const parameter_server::TableSpec& table) const {
    const auto row_bytes = table.row_bytes();
    if (named.count() > kMostRowBytes / row_bytes) {
      throw InvalidArgument(text("a call has ", named.count(), " rows of ", row_bytes, " bytes each; the most is ",
                                 kMostRowBytes / row_bytes, ": use smaller batches"));
    }
    RowsInBlock rows{.count = named.count()};
    if (named.block() < 0) return rows;
    rows.block = state_.blocks.find(named.block());
    if (rows.block == nullptr) throw UnknownBlock("this server has no such shared block");
    rows.ids = rows.block->at(named.ids(), rows.count * sizeof(std::int64_t));
    rows.elements = rows.block->at(named.elements(), rows.count * row_bytes);
    const bool aligned = named.ids() % static_cast<std::int64_t>(sizeof(std::int64_t)) == 0 &&
                         named.elements() % static_cast<std::int64_t>(size_of(table.dtype)) == 0;
    if (rows.ids != nullptr && rows.elements != nullptr && aligned) return rows;
    throw InvalidArgument(
        text(rows.count, " rows are not at ", named.ids(), " and ", named.elements(), " of their shared block"));
  }

  static std::span<const std::int64_t> ids_in(std::span<const std::byte> bytes) {
    return {reinterpret_cast<const std::int64_t*>(bytes.data()), bytes.size() / sizeof(std::int64_t)};
  }

  void write(const Write&) const {
    const auto received = read_parts(shards()->sizes().shards);
    std::vector<const std::byte*> values;
    for (const auto& part : received.parts) values.push_back(part.data());
    reply_transfer(models().write(request_.model(), values));
  }

  void reply_done(bool done) const {
    Reply answer;
    answer.set_done(done);
    reply(answer);
  }

  void cut(const Cut& cut) const {
    const auto written = models_once_made().find_written(request_.model());
    if (written != nullptr) written->cut(cut.end());
    reply_done(written != nullptr);
  }

  void save(const Save& save) const {
    const auto updates = shards()->save(save.end(), save.file());
    Reply answer;
    answer.set_done(updates.has_value());
    answer.set_updates(updates.value_or(0));
    reply(answer);
  }

  void restore(const Restore& restore) const {
    const auto chief = restore.has_chief() ? std::optional(restore.chief()) : std::nullopt;
    reply_transfer(models_once_made().restore(request_.model(), restore.checkpoint(), chief));
  }

  void reply_transfer(std::int64_t last) const {
    Reply answer;
    answer.set_last_transfer(last);
    reply(answer);
  }

  void transfer(const Transfer& transfer) const {
    const auto shards = models().find_written(request_.model());
    reply_done(shards != nullptr);
    if (shards == nullptr) return;
    BulkWriter bulk(stream_.write);
    parameter_server::StateWriter state([&](std::span<const std::byte> data) { bulk.add(data); });
    shards->send(transfer.number(), state);
    bulk.finish();
  }

  void next(const Next& next) const {
    std::optional<parameter_server::Report> report;
    if (next.has_report()) {
      const auto& said = next.report();
      if (said.kind() < 0 || said.kind() > 3) throw InvalidArgument(text("a report of kind ", said.kind()));
      report = parameter_server::Report{.kind = static_cast<parameter_server::Report::Kind>(said.kind()),
                                        .task = {said.task().step(), said.task().part()},
                                        .chief = said.chief(),
                                        .state = said.state(),
                                        .results = {said.results().begin(), said.results().end()},
                                        .error = said.error(),
                                        .leaves = said.leaves()};
      for (const auto& buffer : said.buffers()) report->buffers[buffer.number()] = buffer.values();
      if (said.output_bytes() > parameter_server::kLongestOutput) {
        throw InvalidArgument(
            text("a step returned ", said.output_bytes(), " bytes; the most is ", parameter_server::kLongestOutput));
      }
      report->output.resize(said.output_bytes());
      const auto output = std::as_writable_bytes(std::span(report->output));
      read_bulk({&output, 1}, stream_.read);
    }
    const auto given = chief().next(next.call(), next.worker(), report, poll());
    Reply answer;
    auto& assignment = *answer.mutable_assignment();
    assignment.set_kind(static_cast<int>(given.kind));
    assignment.mutable_task()->set_step(given.task.step);
    assignment.mutable_task()->set_part(given.task.part);
    assignment.set_epoch(given.epoch);
    assignment.set_index(given.index);
    if (given.learning_rate) assignment.set_learning_rate(*given.learning_rate);
    assignment.set_chief(given.chief);
    assignment.set_finished(given.finished);
    assignment.set_state(given.state);
    assignment.set_function(given.function);
    reply_text(std::move(answer), given.arguments);
  }

  void has_begun(const HasBegun& call) const {
    Reply answer;
    answer.set_done(chief().has_begun(call.call(), call.name(), poll()));
    reply(answer);
  }

  void outcome(const Outcome& outcome) const { reply_text(chief().outcome(outcome.call(), poll())); }

  void start(const Start& start) const {
    reply_text(chief().start(start.call(), start.worker(), start.plan(), poll()));
  }

  void reply_text(const std::optional<std::string>& words) const {
    if (!words) return reply();
    reply_text({}, *words);
  }

  void reply_text(Reply answer, const std::string& words) const {
    answer.set_text_bytes(words.size());
    const auto kept = std::make_shared<const std::string>(words);
    reply(answer, {.parts = {std::as_bytes(std::span(*kept))}, .owner = kept});
  }

  // Shards in a block of the caller's.
  struct InBlock {
    explicit InBlock(std::size_t shards) : at(shards) {}
    std::shared_ptr<parameter_server::SharedBlock> block;  // null: there is none
    std::vector<std::byte*> at;                            // [shard], null where it is not there
  };
  InBlock shared(const Shards& named, const ShardStore& store) const {
    InBlock result(store.size());
    result.block = state_.blocks.find(named.block());
    if (result.block == nullptr) throw UnknownBlock("this server has no such shared block");
    if (static_cast<std::size_t>(named.offsets_size()) != store.size()) {
      throw InvalidArgument(text(named.offsets_size(), " shards are shared; this server has ", store.size()));
    }
    for (std::size_t i = 0; i < store.size(); ++i) {
      const auto& shard = store.shard(i);
      const auto offset = named.offsets(static_cast<int>(i));
      if (offset < 0 && request_.has_push()) continue;
      result.at[i] = result.block->at(offset, shard.bytes());
      if (result.at[i] == nullptr || offset % static_cast<std::int64_t>(size_of(shard.dtype())) != 0) {
        throw InvalidArgument(text("a shard of ", shard.bytes(), " bytes is not at ", offset, " of its shared block"));
      }
    }
    return result;
  }

  void share(const Share& share) const {
    const auto block = parameter_server::SharedBlock::open(
        {.process = share.process(), .descriptor = share.file(), .bytes = share.bytes(), .nonce = share.nonce()});
    if (block == nullptr) return reply();
    const auto number = state_.blocks.add(block);
    Reply answer;
    answer.set_block(number);
    reply(answer);
    wait_for_end();
    state_.blocks.remove(number);
  }

  void wait_for_end() const {
    grpc::ByteBuffer frame;
    while (stream_.read(frame)) {
    }
  }

  // Until the other process ends, or does not answer.
  void stay(const Stay& stay) const {
    const parameter_server::Process process{stay.process(), stay.worker()};
    chief().join(process);
    reply();
    wait_for_end();
    chief().leave(process);
  }

  const Services& services_;
  AnswerState& state_;
  const CallStream& stream_;
  const Request& request_;
  const Deadline deadline_;
};

}  // namespace

void answer(const Services& services, AnswerState& state, const CallStream& stream, const Request& request) {
  Answer(services, state, stream, request).give();
}

}  // namespace lockstep::grpc_service
