// Messages between two ranks of one machine: send and receive through shared memory, on a thread of their own.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "local_work.h"
#include "shared_ranks.h"

namespace oases {

// A rank's messages. A send ends once its data are in shared memory, which has room for a part of a large message: the
// rest follows as the receiver takes it. Messages from one rank with one tag arrive in the order they were sent in;
// one that nobody receives yet is kept aside when a later one is wanted first.
class StagedMail {
 public:
  static constexpr int kAnyRank = -1;

  explicit StagedMail(std::shared_ptr<SharedRanks> ranks);
  // Messages that are under way fail.
  ~StagedMail();

  // The tensor is contiguous.
  c10::intrusive_ptr<c10d::Work> send(const at::Tensor& tensor, int to, int tag,
                                      std::chrono::milliseconds timeout);
  c10::intrusive_ptr<c10d::Work> receive(const at::Tensor& tensor, int from, int tag,
                                         std::chrono::milliseconds timeout);

 private:
  class MailWork;
  struct Message;  // a send or a receive
  using Queue = std::deque<std::shared_ptr<Message>>;
  struct Aside {
    int64_t tag;
    at::ScalarType type;
    std::vector<std::byte> data;
  };
  // What comes from a rank.
  struct Incoming {
    std::shared_ptr<Message> into;  // null: to `aside`
    Aside aside;
    int64_t total = -1, done = 0;  // of the message under way; -1: none
    at::ScalarType type = at::ScalarType::Undefined;
    std::deque<Aside> kept;
  };

  c10::intrusive_ptr<c10d::Work> post(std::shared_ptr<Message> message, bool sends);
  void serve();
  bool push(int to, Queue& queue);
  bool pull(int from);
  bool take_kept();
  std::shared_ptr<Message> take_receive(int from, int64_t tag);
  void finish(Message& message, int from, at::ScalarType type);
  void fail(Message& message, const std::string& why);
  void drop_lost();
  bool has_unread(int from) const;
  std::string why_lost(const Message& message, bool sends) const;

  const std::shared_ptr<SharedRanks> ranks_;
  std::mutex mutex_;  // of the two that follow
  std::vector<std::pair<std::shared_ptr<Message>, bool>> posted_;
  bool closing_ = false;
  std::vector<Queue> sends_;
  Queue receives_;
  std::vector<Incoming> incoming_;
  std::chrono::steady_clock::time_point look_at_{};
  std::thread thread_;  // last member: the thread reads the others
};

}  // namespace oases
