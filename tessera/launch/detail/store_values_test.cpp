#include "tessera/launch/detail/store_values.h"

#include <gtest/gtest.h>

#include <limits>

namespace tessera::launch::detail {
namespace {

std::optional<StoreValues::Outcome> hear(StoreValues& values,
                                         const MessageWriter& message) {
  return values.hear(message.text());
}

// What no rank says, as somebody who knows the token may.
TEST(StoreValues, AnswersRequestsAlone) {
  StoreValues values;
  const int64_t most = std::numeric_limits<int64_t>::max();
  ASSERT_TRUE(hear(values, MessageWriter(Request::kSet).add("a").add("text")));
  ASSERT_TRUE(hear(values, MessageWriter(Request::kAdd).add("sum").add(most)));
  ASSERT_TRUE(hear(
      values,
      MessageWriter(Request::kSet).add("large").add("99999999999999999999")));
  for (const MessageWriter& wrong :
       {MessageWriter(static_cast<Request>(0xff)), MessageWriter(Request::kSet),
        MessageWriter(Request::kSet).add("a"),
        MessageWriter(Request::kSet).add("a").add("b").add("c"),
        MessageWriter(Request::kSet).add(int64_t{-1}),
        MessageWriter(Request::kSet).add(most).add("b"),
        MessageWriter(Request::kAdd).add("a").add(int64_t{1}),
        MessageWriter(Request::kAdd).add("sum").add(int64_t{1}),
        MessageWriter(Request::kAdd).add("new").add("1"),
        MessageWriter(Request::kWait), MessageWriter(Request::kWait).add(most),
        MessageWriter(Request::kAdd).add("large").add(int64_t{1}),
        MessageWriter(Request::kGet).add(int64_t{1}),
        MessageWriter(Request::kGet).add(int64_t{1}).add("a").add("sum"),
        MessageWriter(Request::kCheck).add("a").add(int64_t{7}),
        MessageWriter(Request::kCompareSet).add("a").add("b"),
        MessageWriter(Request::kDelete),
        MessageWriter(Request::kCount).add("a")}) {
    EXPECT_FALSE(hear(values, wrong)) << wrong.text();
  }
  EXPECT_FALSE(values.hear(""));
  EXPECT_TRUE(hear(values, MessageWriter(Request::kDelete).add("a")));
}

TEST(StoreValues, AWaitEndsWhenAllOfItsKeysAreThereAtOnce) {
  StoreValues values;
  const auto set = [&](const char* key) {
    hear(values, MessageWriter(Request::kSet).add(key).add("1"));
  };
  auto outcome = hear(values, MessageWriter(Request::kWait)
                                  .add(std::numeric_limits<int64_t>::max())
                                  .add("a")
                                  .add("b"));
  auto& wait = std::get<StoreValues::Wait>(*outcome);
  set("a");
  EXPECT_TRUE(values.has_news());
  EXPECT_FALSE(values.has_news());
  EXPECT_FALSE(values.answer_to(wait));
  hear(values, MessageWriter(Request::kDelete).add("a"));
  set("b");
  EXPECT_FALSE(values.answer_to(wait)) << "the first has gone";
  set("a");
  const auto answer = values.answer_to(wait);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->text(), MessageWriter(Answer::kDone).text());
}

TEST(StoreValues, AWaitMayBeOverAtOnce) {
  StoreValues values;
  auto outcome = hear(
      values, MessageWriter(Request::kGet).add(int64_t{-5}).add("missing"));
  const auto answer = values.answer_to(std::get<StoreValues::Wait>(*outcome));
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->text(), MessageWriter(Answer::kTimedOut).text());
}

}  // namespace
}  // namespace tessera::launch::detail
