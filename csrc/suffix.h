// A suffix automaton over token ids, built online (Blumer et al. 1985), of several documents and with cursors that read it
// along another text (SAM-Decoding, arXiv 2411.10666): what followed the last time that the text ended like this?
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace obole {

// Bytes aligned for cache lines, or for huge pages where there are many. Not zeroed.
using Block = std::unique_ptr<uint8_t[], void (*)(uint8_t*)>;
Block allocate_block(int64_t bytes);

// Plain elements in one block that grows by a quarter. A copy has as much room.
template <class T>
class Column {
public:
    Column() : block_(allocate_block(0)) {}
    Column(const Column& other)
        : block_(allocate_block(other.bytes())), size_(other.size_), capacity_(other.capacity_) {
        if (size_) std::memcpy(block_.get(), other.block_.get(), static_cast<size_t>(size_ * kWidth));
    }
    Column(Column&&) = default;
    Column& operator=(Column&&) = default;

    T& operator[](int64_t i) { return reinterpret_cast<T*>(block_.get())[i]; }
    const T& operator[](int64_t i) const { return reinterpret_cast<const T*>(block_.get())[i]; }
    int64_t size() const { return size_; }
    int64_t bytes() const { return capacity_ * kWidth; }

    void fill(int64_t n, const T& value) {
        reserve(n);
        for (size_ = 0; size_ < n; ++size_) (*this)[size_] = value;
    }
    void push(const T& value) {
        ensure(1);
        (*this)[size_++] = value;
    }
    // Room for `more` elements without another allocation.
    void ensure(int64_t more) {
        if (size_ + more > capacity_) reserve(std::max(size_ + more, size_ + size_ / 4 + 16));
    }
    // Exactly that much room, or more if there is more already.
    void reserve(int64_t capacity) {
        if (capacity <= capacity_) return;
        Block block = allocate_block(capacity * kWidth);
        if (size_) std::memcpy(block.get(), block_.get(), static_cast<size_t>(size_ * kWidth));
        block_ = std::move(block);
        capacity_ = capacity;
    }

private:
    static_assert(std::is_trivially_copyable_v<T>);
    static constexpr int64_t kWidth = sizeof(T);

    Block block_;
    int64_t size_ = 0, capacity_ = 0;
};

// Transitions by (state, token): an open-addressing hash table. `next` chains those of one state by their slots, which move
// when the table grows.
class EdgeTable {
public:
    struct Edge {
        int32_t state, token, target, next;  // state -1: the slot is empty; next -1: the last of its state
    };

    // The slot of (state, token), or the empty one where it belongs. The table must not be empty.
    int64_t slot(int32_t state, int32_t token) const {
        int64_t i = home(state, token);
        while (edges_[i].state >= 0 && (edges_[i].state != state || edges_[i].token != token))
            if (++i == edges_.size()) i = 0;
        return i;
    }
    Edge& operator[](int64_t slot) { return edges_[slot]; }
    const Edge& operator[](int64_t slot) const { return edges_[slot]; }

    void put(int64_t slot, const Edge& edge) {
        edges_[slot] = edge;
        ++used_;
    }
    bool has_room(int64_t more) const { return (used_ + more) * 5 <= edges_.size() * 4; }
    // Make room for `more` edges, and return where each old slot is now.
    std::vector<int32_t> grow(int64_t more);
    int64_t bytes() const { return edges_.bytes(); }

private:
    int64_t home(int32_t state, int32_t token) const {
        uint64_t x = static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32 | static_cast<uint32_t>(token);
        x *= 0x9E3779B97F4A7C15u;
        x = (x ^ x >> 32) * 0xD6E8FEB86659FD93u;
        return static_cast<int64_t>((x >> 32) * static_cast<uint64_t>(edges_.size()) >> 32);
    }

    Column<Edge> edges_;
    int64_t used_ = 0;
};

// A suffix of a text that occurs in an index, and what follows it there.
struct Match {
    struct Branch {
        int32_t token, count;
    };
    static constexpr int kBranches = 8;

    int64_t length = 0, support = 0, total = 0;
    std::vector<int32_t> tokens;
    Branch branches[kBranches];  // best first
    int num_branches = 0;
};

// All substrings of the documents appended to it. A state stands for the strings that end at the same positions; `link` leads
// to the longest of their suffixes that ends elsewhere too. Amortised O(1) a token.
//
// Counts and latest positions are kept for the `counted` longest classes that end at each token. For shorter strings, counts
// are lower bounds and positions may be of an occurrence before the latest.
//
// Not for several threads at once. An index that ran out of memory is not to be used again.
class SuffixIndex {
public:
    static constexpr int64_t kCounted = 16;
    static constexpr int64_t kLimit = INT32_MAX;

    // Refuses to have more than `limit` states or tokens.
    explicit SuffixIndex(int64_t counted = kCounted, int64_t limit = kLimit);
    SuffixIndex(const SuffixIndex&) = default;
    SuffixIndex& operator=(const SuffixIndex&) = delete;

    // Leave the document as it is: what is appended next is another one.
    void begin();
    // Tokens must be >= 0. Throws std::length_error at the limit; the tokens before it stay.
    void append(int32_t token);
    void extend(const int32_t* tokens, int64_t n);
    // Go on where a document has exactly these tokens so far. Returns for how many of them there is one; the rest is appended.
    int64_t resume(const int32_t* tokens, int64_t n);

    int64_t size() const { return tokens_; }
    int64_t bytes() const { return states_.bytes() + text_.bytes() + edges_.bytes(); }  // allocated

    // The longest suffix of the document that something follows. False if there is none.
    bool match(int64_t most, Match& match) const;

private:
    friend class SuffixCursor;

    struct alignas(32) State {
        int32_t len;            // of the longest string
        int32_t link;           // -1 for the root, state 0
        int32_t last;           // where the strings ended last
        uint32_t count : 31;    // and how often
        uint32_t prefix : 1;    // a document begins with the longest
        int32_t token, target;  // one transition; target 0: none
        int32_t more;           // slot of the next one; -1: none
        int32_t best;           // of several, the target that counts most, then the latest
    };

    int32_t target(int32_t state, int32_t token) const;
    void add_edge(int32_t state, int32_t token, int32_t target);
    void redirect(int32_t state, int32_t token, int32_t from, int32_t to);
    int32_t add_state(const State& state);
    int32_t split(int32_t state, int32_t token, int32_t target);
    int32_t enter(int32_t state, int32_t token);
    void make_room(int64_t edges);
    void tally(int32_t before, int32_t position);
    bool describe(int32_t state, int64_t length, int64_t most, bool own, Match& match) const;
    int32_t compare_branches(const State& state, int64_t ends, Match& match) const;
    void copy_text(int64_t from, int64_t most, bool own, std::vector<int32_t>& out) const;

    Column<State> states_;
    Column<int32_t> text_;  // of all documents, with a -1 between two
    EdgeTable edges_;       // transitions other than the first of a state
    int64_t counted_, limit_, tokens_ = 0;
    int32_t end_ = 0;  // the state of the whole document
};

// Reads an index along the tokens of another text, and stays valid while the index grows. The index must outlive it.
class SuffixCursor {
public:
    explicit SuffixCursor(const SuffixIndex& index) : index_(&index) {}

    // `token` >= 0. From then on `match` is about the longest suffix of what matched before and the token that occurs in the
    // index now.
    void advance(int32_t token);
    bool match(int64_t most, Match& match);

private:
    void settle();

    const SuffixIndex* index_;
    int32_t state_ = 0, length_ = 0;  // a suffix of the state's longest string
};

}  // namespace obole
