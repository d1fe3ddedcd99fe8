#include "staged_mail.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "join_thread.h"

namespace oases {
namespace {
// How often a wait looks whether its peers are alive.
constexpr std::chrono::milliseconds kLookForLost{100};
}  // namespace

class StagedMail::MailWork : public LocalWork {
 public:
  using LocalWork::LocalWork;
  int sourceRank() const override { return source_; }
  void came_from(int rank) { source_ = rank; }

 private:
  std::atomic<int> source_{-1};
};

struct StagedMail::Message {
  std::byte* data() const { return static_cast<std::byte*>(tensor.data_ptr()); }
  int64_t bytes() const { return static_cast<int64_t>(tensor.nbytes()); }
  at::ScalarType type() const { return tensor.scalar_type(); }
  // Of what comes with this type, none where another is wanted.
  int64_t room(at::ScalarType sent) const { return sent == type() ? bytes() : 0; }

  at::Tensor tensor;
  int rank;  // the other one
  int64_t tag;
  Patience patience;
  c10::intrusive_ptr<MailWork> work;
  int64_t done = 0;
  bool started = false;
};

StagedMail::StagedMail(std::shared_ptr<SharedRanks> ranks)
    : ranks_(std::move(ranks)), sends_(ranks_->size()), incoming_(ranks_->size()) {
  thread_ = std::thread([this] { serve(); });
}

StagedMail::~StagedMail() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  ranks_->mail_bell(ranks_->rank()).ring();
  join_thread(thread_);
}

c10::intrusive_ptr<c10d::Work> StagedMail::post(std::shared_ptr<Message> message, bool sends) {
  auto work = message->work;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    posted_.emplace_back(std::move(message), sends);
  }
  ranks_->mail_bell(ranks_->rank()).ring();
  return work;
}

c10::intrusive_ptr<c10d::Work> StagedMail::send(const at::Tensor& tensor, int to, int tag,
                                                std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(to >= 0 && to < ranks_->size() && to != ranks_->rank(), "send: rank ", ranks_->rank(),
                    " cannot send to rank ", to, " of ", ranks_->size());
  auto work =
      c10::make_intrusive<MailWork>(ranks_->rank(), c10d::OpType::SEND, std::vector<at::Tensor>{tensor});
  return post(std::make_shared<Message>(Message{tensor, to, tag, {"send", timeout}, work}), true);
}

c10::intrusive_ptr<c10d::Work> StagedMail::receive(const at::Tensor& tensor, int from, int tag,
                                                   std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(from == kAnyRank || (from >= 0 && from < ranks_->size() && from != ranks_->rank()),
                    "recv: rank ", ranks_->rank(), " cannot receive from rank ", from, " of ",
                    ranks_->size());
  auto work =
      c10::make_intrusive<MailWork>(ranks_->rank(), c10d::OpType::RECV, std::vector<at::Tensor>{tensor});
  return post(std::make_shared<Message>(Message{tensor, from, tag, {"recv", timeout}, work}), false);
}

void StagedMail::serve() {
  Bell& bell = ranks_->mail_bell(ranks_->rank());
  while (true) {
    const uint32_t seen = bell.value();  // before looking: what comes later rings
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [message, sends] : posted_)
        (sends ? sends_[message->rank] : receives_).push_back(std::move(message));
      posted_.clear();
      if (closing_) break;
    }
    bool moved = take_kept(), idle = receives_.empty();
    for (int rank = 0; rank < ranks_->size(); ++rank) {
      moved |= push(rank, sends_[rank]);
      moved |= pull(rank);
      idle &= sends_[rank].empty() && !incoming_[rank].into;  // after the pull, which may begin one
    }
    if (moved) continue;
    drop_lost();
    bell.wait(seen, idle ? std::chrono::milliseconds(10000) : kLookForLost, 0);
  }
  const std::string why = c10::str("the group of rank ", ranks_->name(ranks_->rank()), " was destroyed");
  for (auto& queue : sends_)
    for (auto& message : queue) fail(*message, why);
  for (auto& message : receives_) fail(*message, why);
  for (auto& incoming : incoming_)
    if (incoming.into) fail(*incoming.into, why);
}

// Puts frames into the channel while there is room. True: something moved.
bool StagedMail::push(int to, Queue& queue) {
  auto& channel = *reinterpret_cast<Channel*>(ranks_->channel(ranks_->rank(), to));
  bool moved = false;
  while (!queue.empty()) {
    Message& message = *queue.front();
    const uint32_t at = channel.written.load(std::memory_order_relaxed);
    if (at - channel.read.load(std::memory_order_acquire) == Channel::kFrames) break;
    const int64_t bytes = std::min(Channel::kFrameBytes, message.bytes() - message.done);
    channel.frames[at % Channel::kFrames] = {message.tag, message.bytes(), bytes, message.type()};
    if (bytes > 0) std::memcpy(channel.data[at % Channel::kFrames], message.data() + message.done, bytes);
    message.started = moved = true;
    message.done += bytes;
    channel.written.store(at + 1, std::memory_order_release);
    ranks_->mail_bell(to).ring();
    if (message.done < message.bytes()) continue;
    message.work->end(nullptr);
    queue.pop_front();
  }
  return moved;
}

// The first receive that was posted for a message.
std::shared_ptr<StagedMail::Message> StagedMail::take_receive(int from, int64_t tag) {
  const auto found = std::find_if(receives_.begin(), receives_.end(), [&](const auto& message) {
    return (message->rank == from || message->rank == kAnyRank) && message->tag == tag;
  });
  if (found == receives_.end()) return nullptr;
  auto message = *found;
  receives_.erase(found);
  return message;
}

// Takes frames out of the channel if a receive may wait for what they bring. True: something moved.
bool StagedMail::pull(int from) {
  auto& channel = *reinterpret_cast<Channel*>(ranks_->channel(from, ranks_->rank()));
  Incoming& incoming = incoming_[from];
  bool moved = false;
  while (true) {
    const bool wanted =
        incoming.into || std::any_of(receives_.begin(), receives_.end(), [&](const auto& message) {
          return message->rank == from || message->rank == kAnyRank;
        });
    const uint32_t at = channel.read.load(std::memory_order_relaxed);
    if (!wanted || at == channel.written.load(std::memory_order_acquire)) return moved;
    const Frame frame = channel.frames[at % Channel::kFrames];
    if (incoming.total < 0) {
      incoming.total = frame.total, incoming.done = 0, incoming.type = frame.type;
      incoming.into = take_receive(from, frame.tag);
      incoming.aside = {frame.tag, frame.type, {}};
      if (incoming.into)
        incoming.into->started = true;
      else
        incoming.aside.data.resize(frame.total);
    }
    const std::byte* const data = channel.data[at % Channel::kFrames];
    std::byte* const to = incoming.into ? incoming.into->data() : incoming.aside.data.data();
    const int64_t room = incoming.into ? incoming.into->room(incoming.type) : incoming.total;
    const int64_t fits = std::clamp<int64_t>(room - incoming.done, 0, frame.bytes);
    if (fits > 0) std::memcpy(to + incoming.done, data, fits);
    incoming.done += frame.bytes;
    channel.read.store(at + 1, std::memory_order_release);
    ranks_->mail_bell(from).ring();
    moved = true;
    if (incoming.done < incoming.total) continue;
    if (incoming.into) {
      incoming.into->done = incoming.total;
      finish(*incoming.into, from, incoming.type);
    } else {
      incoming.kept.push_back(std::move(incoming.aside));
    }
    incoming.into.reset(), incoming.total = -1;
    take_kept();
  }
}

// Delivers messages that were put aside. True: something moved.
bool StagedMail::take_kept() {
  bool moved = false;
  for (int from = 0; from < ranks_->size(); ++from) {
    auto& kept = incoming_[from].kept;
    for (auto it = kept.begin(); it != kept.end();) {
      const auto message = take_receive(from, it->tag);
      if (!message) {
        ++it;
        continue;
      }
      message->done = static_cast<int64_t>(it->data.size());
      if (const auto bytes = std::min(message->done, message->room(it->type)))
        std::memcpy(message->data(), it->data.data(), bytes);
      finish(*message, from, it->type);
      it = kept.erase(it), moved = true;
    }
  }
  return moved;
}

void StagedMail::finish(Message& message, int from, at::ScalarType type) {
  message.work->came_from(from);
  std::exception_ptr error;
  try {
    TORCH_CHECK_VALUE(message.done == message.bytes() && type == message.type(), "recv: rank ",
                      ranks_->name(from), " sent ", message.done, " bytes of ", type, ", rank ",
                      ranks_->name(ranks_->rank()), " receives ", message.bytes(), " of ", message.type(),
                      "; give both the same size and type");
  } catch (...) {
    error = std::current_exception();
  }
  message.work->end(error);
}

void StagedMail::fail(Message& message, const std::string& why) {
  std::exception_ptr error;
  try {
    TORCH_CHECK_WITH(DistBackendError, false, message.patience.operation, ": ", why);
  } catch (...) {
    error = std::current_exception();
  }
  message.work->end(error);
}

std::string StagedMail::why_lost(const Message& message, bool sends) const {
  std::string why = ranks_->broken();
  if (!why.empty()) return why;
  if (message.rank != kAnyRank) {
    why = ranks_->gone(message.rank);
  } else {
    for (int rank = 0; rank < ranks_->size(); ++rank) {
      if (rank == ranks_->rank()) continue;
      why = ranks_->gone(rank);
      if (why.empty()) break;
    }
  }
  if (!why.empty() || !message.patience.over()) return why;
  return c10::str(
      "rank ", ranks_->name(ranks_->rank()), " timed out after ", message.patience.timeout.count(),
      " ms waiting for ",
      message.rank == kAnyRank ? std::string("any rank") : c10::str("rank ", ranks_->name(message.rank)),
      sends ? " to receive" : " to send");
}

// Fails what can no longer end. A message that was begun leaves its channel in the middle: the group is given up.
void StagedMail::drop_lost() {
  const auto now = std::chrono::steady_clock::now();
  if (now < look_at_) return;
  look_at_ = now + kLookForLost;
  const auto lost = [this](const Message& message, bool sends) {
    const std::string why = why_lost(message, sends);
    // Frames that a rank left behind before it ended are taken first.
    return !sends && has_unread(message.rank) ? "" : why;
  };
  const auto end = [this](Message& message, const std::string& why) {
    if (message.started) ranks_->break_group(c10::str(message.patience.operation, ": ", why));
    fail(message, why);
  };
  const auto drop = [&](Queue& queue, bool sends) {
    for (auto it = queue.begin(); it != queue.end();) {
      const std::string why = lost(**it, sends);
      if (!why.empty()) end(**it, why);
      it = why.empty() ? std::next(it) : queue.erase(it);
    }
  };
  for (auto& queue : sends_) drop(queue, true);
  drop(receives_, false);
  for (int rank = 0; rank < ranks_->size(); ++rank) {
    Incoming& incoming = incoming_[rank];
    if (!incoming.into) continue;
    const std::string why = lost(*incoming.into, false);
    if (why.empty()) continue;
    end(*incoming.into, why);
    incoming.into.reset();
  }
}

bool StagedMail::has_unread(int from) const {
  for (int rank = 0; rank < ranks_->size(); ++rank) {
    const auto& channel = *reinterpret_cast<Channel*>(ranks_->channel(rank, ranks_->rank()));
    if ((from == kAnyRank || from == rank) &&
        channel.read.load(std::memory_order_relaxed) != channel.written.load(std::memory_order_acquire))
      return true;
  }
  return false;
}

}  // namespace oases
