package edgelimit

import (
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"maps"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

var snapshotPepper = []byte("0123456789abcdef0123456789abcdef")

// savedLimit is a limit with one client that owes three requests of five, and one
// that is banned, as a snapshot of now.
func savedLimit(t *testing.T) (limits map[string]*limitState, debtor, banned uint64) {
	t.Helper()
	state := newLimitState(limitNumbers{gcra{int64(12 * time.Minute), int64(time.Hour)}, 1000})
	debtor, banned = 1<<40, 1<<41
	state.ledger.Load().Set(debtor, int64(time.Hour), int64(time.Hour+36*time.Minute))
	state.ledger.Load().Set(banKey(banned), int64(time.Hour), int64(time.Hour+10*time.Minute))
	return map[string]*limitState{"login": state}, debtor, banned
}

// remembers says how long two keys still owe, in a limit that restored a
// snapshot.
func restored(t *testing.T, data []byte, rateText string, burst int64, ban, later time.Duration) (debt, ban_ time.Duration) {
	t.Helper()
	written := time.Now()
	limits, err := decodeSnapshot(data, snapshotPepper, written.Add(later))
	if err != nil {
		t.Fatal(err)
	}
	r, err := parseRate(rateText)
	if err != nil {
		t.Fatal(err)
	}
	g, err := newGCRA(r, burst)
	if err != nil {
		t.Fatal(err)
	}
	limit := &Limit{gcra: g, numbers: limitNumbers{g, 1000}}
	limit.Ban = caddy.Duration(ban)
	limit.state = newLimitState(limit.numbers)
	now := int64(5 * time.Second)
	limit.restore(limits["login"], now)
	left := func(key uint64) time.Duration {
		return time.Duration(max(0, limit.state.ledger.Load().Peek(key, now)-now)).Round(time.Second)
	}
	return left(1 << 40), left(banKey(1 << 41))
}

func TestSnapshot(t *testing.T) {
	limits, _, _ := savedLimit(t)
	data := encodeSnapshot(limits, snapshotPepper, int64(time.Hour), time.Now())
	const year = 365 * 24 * time.Hour
	tests := []struct {
		why   string
		rate  string
		burst int64
		ban   time.Duration
		later time.Duration
		debt  time.Duration
		left  time.Duration
	}{
		{"at once: all is as it was", "5/h", 5, 10 * time.Minute, 0, 36 * time.Minute, 10 * time.Minute},
		{"the time that passed has worked off debts and bans", "5/h", 5, 10 * time.Minute, 6 * time.Minute, 30 * time.Minute, 4 * time.Minute},
		{"a clock a year ahead: all is over", "5/h", 5, 10 * time.Minute, year, 0, 0},
		{"a clock a year behind: nothing lasts longer than it did", "5/h", 5, 10 * time.Minute, -year, 36 * time.Minute, 10 * time.Minute},
		{"other numbers: the share of the budget that was used stays, bans keep their end", "5/m", 5, 10 * time.Minute, 0, 36 * time.Second, 10 * time.Minute},
		{"no ban any more: nobody is banned", "5/h", 5, 0, 0, 36 * time.Minute, 0},
		{"a shorter ban: nobody for longer", "5/h", 5, time.Minute, 0, 36 * time.Minute, time.Minute},
	}
	for _, tt := range tests {
		t.Run(tt.why, func(t *testing.T) {
			debt, ban := restored(t, data, tt.rate, tt.burst, tt.ban, tt.later)
			expect(t, debt, tt.debt, "debt")
			expect(t, ban, tt.left, "ban")
		})
	}
}

func TestSnapshotThatIsUnreadable(t *testing.T) {
	limits, _, _ := savedLimit(t)
	good := encodeSnapshot(limits, snapshotPepper, int64(time.Hour), time.Now())
	newer := append([]byte(nil), good...)
	binary.LittleEndian.PutUint16(newer[len(snapshotMagic):], snapshotVersion+1)
	flipped := append([]byte(nil), good...)
	flipped[len(flipped)/2] ^= 1
	tests := []struct {
		why   string
		data  []byte
		words string
	}{
		{"cut in half", good[:len(good)/2], "cut off"},
		{"one byte is missing", good[:len(good)-1], "cut off"},
		{"empty", nil, "cut off"},
		{"something else", []byte("hello, this is no snapshot at all, but long enough to be one, perhaps"), "cut off"},
		{"one bit is wrong", flipped, "cut off"},
		{"from a newer version", newer, "version 2"},
	}
	for _, tt := range tests {
		t.Run(tt.why, func(t *testing.T) {
			if _, err := decodeSnapshot(tt.data, snapshotPepper, time.Now()); err == nil || !strings.Contains(err.Error(), tt.words) {
				t.Errorf("got the error %v, want one with %q", err, tt.words)
			}
		})
	}
	if _, err := decodeSnapshot(good, []byte("another pepper altogether"), time.Now()); !errors.Is(err, errOtherPepper) {
		t.Errorf("another pepper: got the error %v", err)
	}
}

func FuzzSnapshot(f *testing.F) {
	state := newLimitState(limitNumbers{gcra{1000, 5000}, 1000})
	state.ledger.Load().Set(2, 1, 3000)
	f.Add(encodeSnapshot(map[string]*limitState{"a": state, "b": state}, snapshotPepper, 1, time.Unix(1, 0)))
	f.Fuzz(func(t *testing.T, data []byte) {
		limits, err := decodeSnapshot(data, snapshotPepper, time.Unix(1, 0))
		if err != nil && limits != nil {
			t.Error("an error came with debts")
		}
	})
}

// memoryStorage is a storage that fails when it is told to.
type memoryStorage struct {
	certmagic.Storage // locks and the like are not used
	files             map[string][]byte
	fail              error
}

func (s *memoryStorage) Store(_ context.Context, key string, value []byte) error {
	if s.fail == nil {
		s.files[key] = value
	}
	return s.fail
}

func (s *memoryStorage) Load(_ context.Context, key string) ([]byte, error) {
	if value, ok := s.files[key]; ok {
		return value, s.fail
	}
	return nil, fs.ErrNotExist
}

func newTestPersister(t *testing.T, files map[string][]byte) (*persister, *memoryStorage, *observer.ObservedLogs) {
	t.Helper()
	t.Setenv("XDG_DATA_HOME", t.TempDir())
	core, logs := observer.New(zap.InfoLevel)
	storage := &memoryStorage{files: files}
	p := &persister{storage: storage, pepper: snapshotPepper, logger: zap.New(core), patience: time.Minute}
	p.load(context.Background())
	return p, storage, logs
}

// Nothing is written before a configuration has started: validating one on a live
// machine must leave its snapshot alone.
func TestNothingIsWrittenBeforeTheStart(t *testing.T) {
	files := map[string][]byte{}
	p, _, _ := newTestPersister(t, files)
	_ = p.Destruct()
	expect(t, len(files), 0, "files after a configuration that never started")

	p, storage, logs := newTestPersister(t, files)
	p.start(storage, snapshotPepper, p.logger)
	expect(t, len(files), 0, "starting alone writes nothing")
	_ = p.Destruct()
	expect(t, len(files), 1, "the last user is gone")
	expect(t, logs.Len(), 0, "nothing to complain about")
}

func TestUnreadableSnapshotIsSetAside(t *testing.T) {
	files := map[string][]byte{}
	p, _, _ := newTestPersister(t, files)
	if !p.name() { // which makes this instance's id
		t.Fatal("there is no id")
	}
	files[p.key] = []byte("damaged")
	p.load(context.Background())
	expect(t, len(files), 1, "reading changes nothing")
	p.start(&memoryStorage{files: files}, snapshotPepper, p.logger)
	expect(t, string(files[p.key+".unreadable"]), "damaged", "what could not be read")
	_ = p.Destruct()
	if _, err := decodeSnapshot(files[p.key], snapshotPepper, time.Now()); err != nil {
		t.Errorf("in its place there must be a good one: %v", err)
	}
}

// A storage that fails is logged and never fatal.
func TestFailingStorage(t *testing.T) {
	p, storage, logs := newTestPersister(t, map[string][]byte{})
	storage.fail = errors.New("the disk is full")
	p.start(storage, snapshotPepper, p.logger)
	_ = p.Destruct()
	expect(t, logs.FilterMessage("debts cannot be written to Caddy's storage").Len(), 1, "warnings")
}

// The first limit of a name takes the debts of the last run, and limits that are
// no more leave nothing behind.
func TestRestoreOnce(t *testing.T) {
	limits, debtor, _ := savedLimit(t)
	limits["gone"] = limits["login"]
	p := &persister{key: "k", logger: zap.NewNop(), storage: &memoryStorage{files: map[string][]byte{}}, patience: time.Minute}
	var err error
	p.pending, err = decodeSnapshot(encodeSnapshot(maps.Clone(limits), snapshotPepper, int64(time.Hour), time.Now()), snapshotPepper, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	limit := &Limit{Name: "login", gcra: limits["login"].ledger.Load().gcra}
	limit.state = newLimitState(limitNumbers{limit.gcra, 1000})
	p.restore(limit, int64(time.Minute))
	expect(t, limit.state.ledger.Load().Len(), 1, "keys that were restored: a ban needs a limit that bans")
	limit.state.ledger.Load().Delete(debtor)
	p.restore(limit, int64(time.Minute))
	expect(t, limit.state.ledger.Load().Len(), 0, "once only")
	p.start(p.storage, snapshotPepper, p.logger)
	expect(t, len(p.pending), 0, "debts of limits that are no more")
	_ = p.Destruct()
}

// A snapshot is for states that begin. Those that live go on as they are when a
// reload turns persist on again, and also when that reload fails.
func TestRestoreLeavesLivingStatesAlone(t *testing.T) {
	site := func(persist string) *caddy.Config {
		return configOf(t, "{\nedge_limit {\npersist "+persist+"\n}\n}\n:80 {\nedge_limit {\nlimit login 3/h\n}\nrespond ok\n}")
	}
	storage := ownStorage(t)
	load := func(persist string) *instance {
		i, err := tryInstanceOn(t, site(persist), storage)
		if err != nil {
			t.Fatal(err)
		}
		i.now.Store(clock())
		return i
	}
	written := load("on")
	if err := appOf(t, written).Start(); err != nil {
		t.Fatal(err)
	}
	expect(t, written.passed(1, alice, "/"), 1, "one request is in the snapshot")
	living := load("off")
	written.stop()
	expect(t, living.passed(5, alice, "/"), 2, "the rest of the budget, without persist")
	again := load("on")
	expect(t, again.passed(5, alice, "/"), 0, "nothing is renewed by reading what was written before")
	expect(t, living.passed(5, alice, "/"), 0, "nor for the configuration that runs, should the other one fail")
}

// hangingStorage takes what is stored and never says so.
type hangingStorage struct {
	certmagic.Storage
	storing, release chan struct{}
}

func (s *hangingStorage) Store(context.Context, string, []byte) error {
	s.storing <- struct{}{}
	<-s.release
	return nil
}

// A reload waits for no snapshot.
func TestStorageThatHangs(t *testing.T) {
	storage := &hangingStorage{nil, make(chan struct{}, 2), make(chan struct{})}
	p := &persister{storage: storage, key: "x", pepper: snapshotPepper, logger: zap.NewNop(), patience: time.Minute}
	go p.write()
	<-storage.storing
	p.start(storage, snapshotPepper, zap.NewNop()) // would wait for ever
	close(storage.release)
	_ = p.Destruct()
	expect(t, len(storage.storing), 1, "the last snapshot is written")
}

// A last snapshot that had to wait for longer than the server's stop may take is
// not written any more: the limits that it was to have are gone, and it would
// write nothing over the one that is there.
func TestLastSnapshotTooLate(t *testing.T) {
	storage := &hangingStorage{nil, make(chan struct{}, 2), make(chan struct{})}
	p := &persister{storage: storage, key: "x", pepper: snapshotPepper, logger: zap.NewNop(), patience: time.Millisecond}
	go p.write()
	<-storage.storing
	p.start(storage, snapshotPepper, zap.NewNop())
	_ = p.Destruct() // gives up
	close(storage.release)
	p.writing.Lock() // once it is free, and the last one may have had its turn
	p.writing.Unlock()
	p.write()
	expect(t, len(storage.storing), 0, "snapshots that were written later")
}

// Where there is no room for all debts, the largest are restored.
func TestLargestDebtsAreRestored(t *testing.T) {
	numbers := numbersOf(t, "5/h", 0, 8)
	limit := &Limit{gcra: numbers.gcra, numbers: numbers, state: newLimitState(numbers)}
	saved := limitSnapshot{tolerance: hour}
	for n := int64(16); n > 0; n-- {
		saved.entries = append(saved.entries, debtEntry{uint64(n) << 40, n * int64(time.Minute)})
	}
	limit.restore(saved, hour)
	expect(t, limit.state.ledger.Load().Len(), 8, "debts")
	for key, tat := range limit.state.ledger.Load().All() {
		if tat < hour+9*int64(time.Minute) {
			t.Errorf("the debt of %x is among them, of %s", key, time.Duration(tat-hour))
		}
	}
}

func TestPersistByDefault(t *testing.T) {
	expect(t, persistByDefault(&certmagic.FileStorage{}), true, "a file system")
	expect(t, persistByDefault(&memoryStorage{}), false, "anything else")
}

// A whole life: a client that used its budget up has used it up after a restart,
// with its key hashed by the same stored pepper.
func TestRestart(t *testing.T) {
	const site = `:80 {
		edge_limit {
			limit login 3/h {
				ban 2h
			}
		}
		respond ok
	}`
	storage := ownStorage(t)
	first, err := tryInstanceOn(t, configOf(t, site), storage)
	if err != nil {
		t.Fatal(err)
	}
	app, _ := first.ctx.App(appName)
	if err := app.(*App).Start(); err != nil {
		t.Fatal(err)
	}
	for _, l := range first.handlers[0].keyed {
		key, _ := l.template.hash(&resolution{client: netip.MustParseAddr(alice)}, nil)
		now := clock()
		for range 3 {
			l.take(key, l.gcra.emissionInterval, now)
		}
		_, wait, ok := l.take(key, l.gcra.emissionInterval, now)
		expect(t, ok, false, "the budget is used up")
		l.deny(key, wait, now)
	}
	first.stop()

	second, err := tryInstanceOn(t, configOf(t, site), storage)
	if err != nil {
		t.Fatal(err)
	}
	second.now.Store(clock())
	w := second.send(requestFrom(alice, "/"))
	expect(t, w.Code, 429, "still banned")
	expect(t, w.Header().Get("Retry-After"), "7200", "for the rest of the ban")
	expect(t, second.get(bob, "/"), 200, "others are not")
}
