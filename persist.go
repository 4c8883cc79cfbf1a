package edgelimit

import (
	"bytes"
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

// Debts and bans survive a restart: they are written to Caddy's storage once a
// minute while the server runs and when the last configuration is gone, and read
// when the first one comes. That the last user is gone, not a flag, tells a stop
// from a reload. Ceilings and what is in flight start anew.

const (
	snapshotInterval = time.Minute
	loadTimeout      = 30 * time.Second // no start waits for longer
)

// persister writes the snapshot. There is one in a process, shared by the
// configurations that persist.
type persister struct {
	writing  sync.Mutex    // held while a snapshot is written, which may take long
	tooLate  atomic.Bool   // for what still waits to be written: its limits are gone
	patience time.Duration // with the last snapshot
	mu       sync.Mutex
	storage  certmagic.Storage
	key      string
	pepper   []byte
	logger   *zap.Logger
	stop     chan struct{} // nil until a configuration has started: nothing is written before

	pending    map[string]limitSnapshot // what was read, until limits take it
	unreadable []byte                   // a snapshot that could not be read, to be set aside
}

// usePersister takes the process's persister, which reads the snapshot when it
// is made.
func usePersister(ctx caddy.Context, pepper []byte) (*persister, stateKey, error) {
	key := stateKey{"snapshot", ""}
	p, err := takeState(key, func() *persister {
		p := &persister{storage: ctx.Storage(), pepper: pepper, logger: ctx.Logger(), patience: 2 * storageTimeout}
		p.load(ctx)
		return p
	})
	return p, key, err
}

// persistByDefault says whether debts are kept without being asked for: where
// the storage is a file system. Others may be slow, or billed by the write.
func persistByDefault(storage certmagic.Storage) bool {
	_, isFiles := storage.(*certmagic.FileStorage)
	return isFiles
}

// load reads the snapshot. What is wrong with it is logged and never fatal.
func (p *persister) load(ctx context.Context) {
	// Asking Caddy for this instance's id would make one, and nothing may be
	// written yet. Without an id there is no snapshot either.
	if _, err := os.Stat(filepath.Join(caddy.AppDataDir(), "instance.uuid")); err != nil {
		return
	}
	if !p.name() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	data, err := p.storage.Load(ctx, p.key)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		p.logger.Warn("debts of the last run cannot be read from Caddy's storage; the next ones are written over them",
			zap.String("key", p.key), zap.Error(err))
		return
	}
	p.pending, err = decodeSnapshot(data, p.pepper, time.Now())
	switch {
	case errors.Is(err, errOtherPepper):
		p.logger.Info("debts of the last run are not used: the pepper is another one")
	case err != nil:
		p.unreadable = data
		p.logger.Warn("debts of the last run cannot be read; they are set aside when the server has started",
			zap.String("key", p.key), zap.Error(err))
	}
}

// name finds the place of this instance's snapshot.
func (p *persister) name() bool {
	instance, err := caddy.InstanceID()
	if err != nil {
		p.logger.Warn("debts cannot be kept over a restart: this instance has no id", zap.Error(err))
		return false
	}
	p.key = "edge_limit/" + instance.String() + "/debts"
	return true
}

// restore hands a limit the debts of the last run, once.
func (p *persister) restore(limit *Limit, now int64) {
	p.mu.Lock()
	debts, ok := p.pending[limit.Name]
	delete(p.pending, limit.Name)
	p.mu.Unlock()
	if ok {
		limit.restore(debts, now)
	}
}

// restore takes over debts that may have been measured in other numbers. None is
// longer than these numbers can make it, whatever the clocks said.
func (l *Limit) restore(debts limitSnapshot, now int64) {
	slices.SortFunc(debts.entries, func(a, b debtEntry) int { return cmp.Compare(a.debt, b.debt) })
	before := gcra{tolerance: debts.tolerance}
	into := l.state.ledger.Load()
	for _, entry := range debts.entries {
		tat := now + min(entry.debt, int64(l.Ban))
		if !isBan(entry.key) {
			tat = into.rescaled(now+min(entry.debt, debts.tolerance), before, now)
		}
		if tat > now {
			into.Set(entry.key, now, tat)
		}
	}
}

// start makes the persister write, for a configuration that has started.
func (p *persister) start(storage certmagic.Storage, pepper []byte, logger *zap.Logger) {
	p.begin(storage, pepper, logger)
	p.mu.Lock()
	unreadable, key := p.unreadable, p.key
	p.unreadable = nil
	p.mu.Unlock()
	if unreadable != nil {
		store(storage, key+".unreadable", unreadable, logger)
	}
}

func (p *persister) begin(storage certmagic.Storage, pepper []byte, logger *zap.Logger) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.storage, p.pepper, p.logger = storage, pepper, logger
	p.pending = nil // of limits that are no more
	if p.stop != nil || p.key == "" && !p.name() {
		return
	}
	p.stop = make(chan struct{})
	go p.run(p.stop)
}

func (p *persister) run(stop chan struct{}) {
	ticker := time.NewTicker(snapshotInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			p.write()
		case <-stop:
			return
		}
	}
}

// Destruct writes for the last time: the last configuration is gone.
func (p *persister) Destruct() error {
	p.mu.Lock()
	stop := p.stop
	p.stop = nil
	p.mu.Unlock()
	if stop == nil {
		return nil
	}
	close(stop)
	written := make(chan struct{})
	go func() {
		p.write()
		close(written)
	}()
	select {
	case <-written:
	case <-time.After(p.patience): // not every storage heeds its context
		p.tooLate.Store(true)
		p.logger.Warn("debts are not written: Caddy's storage does not answer")
	}
	return nil
}

// write writes a snapshot. Nobody who starts or ends a configuration waits for it.
func (p *persister) write() {
	p.writing.Lock()
	defer p.writing.Unlock()
	if p.tooLate.Load() {
		return
	}
	p.mu.Lock()
	storage, key, pepper, logger := p.storage, p.key, p.pepper, p.logger
	p.mu.Unlock()
	store(storage, key, encodeSnapshot(limitStates(), pepper, clock(), time.Now()), logger)
}

// store has a context of its own: that of a configuration ends with it.
func store(storage certmagic.Storage, key string, data []byte, logger *zap.Logger) {
	ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
	defer cancel()
	if err := storage.Store(ctx, key, data); err != nil {
		logger.Warn("debts cannot be written to Caddy's storage", zap.String("key", key), zap.Error(err))
	}
}

// limitStates are the states of all limits, by name.
func limitStates() map[string]*limitState {
	limits := make(map[string]*limitState)
	states.Range(func(key, state any) bool {
		if limit, ok := state.(*limitState); ok {
			limits[key.(stateKey).name] = limit
		}
		return true
	})
	return limits
}

// limitSnapshot are the debts of one limit.
type limitSnapshot struct {
	tolerance int64 // of the numbers that the debts are measured in
	entries   []debtEntry
}

// debtEntry is a key's hash and how long its debt, or its ban, still lasts.
type debtEntry struct {
	key  uint64
	debt int64 // nanoseconds
}

// The snapshot's form: magic and version, a check of the pepper, the wall time
// of writing, then for each limit its name, its tolerance, the number of its
// entries and these; all integers little-endian, and at the end SHA-256 of what
// comes before.
const (
	snapshotMagic   = "edge_limit debts"
	snapshotVersion = 1
)

var (
	errOtherPepper = errors.New("written with another pepper")
	errCutOff      = errors.New("it is cut off or damaged")
)

func pepperCheck(pepper []byte) []byte {
	mac := hmac.New(sha256.New, pepper)
	mac.Write([]byte(snapshotMagic))
	return mac.Sum(nil)[:8]
}

func encodeSnapshot(limits map[string]*limitState, pepper []byte, now int64, wall time.Time) []byte {
	le := binary.LittleEndian
	size := 0
	for name, state := range limits {
		size += len(name) + 18 + 16*state.ledger.Load().Len()
	}
	data := make([]byte, 0, size+100) // to let it grow would be to copy all of it several times
	data = le.AppendUint16(append(data, snapshotMagic...), snapshotVersion)
	data = append(data, pepperCheck(pepper)...)
	data = le.AppendUint64(data, uint64(wall.UnixNano()))
	for name, state := range limits {
		data = le.AppendUint16(data, uint16(len(name)))
		data = append(data, name...)
		debts := state.ledger.Load()
		data = le.AppendUint64(data, uint64(debts.tolerance))
		countAt := len(data)
		data = le.AppendUint64(data, 0)
		var count uint64
		for key, tat := range debts.All() {
			if debt := tat - now; debt > 0 {
				data = le.AppendUint64(data, key)
				data = le.AppendUint64(data, uint64(debt))
				count++
			}
		}
		le.PutUint64(data[countAt:], count)
	}
	// Nothing can interrupt the hashing of one piece of memory, which takes more
	// than ten milliseconds for a million debts. So it is done in small ones, and
	// requests come first after each.
	sum := sha256.New()
	for piece := range slices.Chunk(data, 64<<10) {
		sum.Write(piece)
		runtime.Gosched()
	}
	return sum.Sum(data)
}

// decodeSnapshot reads the debts as they are after the time that went by. A clock
// that was set back since counts as no time: the debts stay.
func decodeSnapshot(data, pepper []byte, wall time.Time) (map[string]limitSnapshot, error) {
	rest, ok := bytes.CutPrefix(data, []byte(snapshotMagic))
	if !ok || len(rest) < 2 {
		return nil, errCutOff
	}
	if version := binary.LittleEndian.Uint16(rest); version != snapshotVersion {
		return nil, fmt.Errorf("version %d is not known, only %d", version, snapshotVersion)
	}
	body := len(data) - sha256.Size
	if body < len(snapshotMagic) {
		return nil, errCutOff
	}
	if sum := sha256.Sum256(data[:body]); !bytes.Equal(sum[:], data[body:]) {
		return nil, errCutOff
	}
	r := snapshotReader{data: data[len(snapshotMagic)+2 : body]}
	if !bytes.Equal(r.bytes(8), pepperCheck(pepper)) {
		return nil, errOtherPepper
	}
	elapsed := max(0, int64(wall.Sub(time.Unix(0, int64(r.uint64())))))
	limits := make(map[string]limitSnapshot)
	for len(r.data) > 0 && !r.failed {
		name := string(r.bytes(int(binary.LittleEndian.Uint16(r.bytes(2)))))
		limit := limitSnapshot{tolerance: max(1, int64(r.uint64()))}
		for count := r.uint64(); count > 0 && !r.failed; count-- {
			key, debt := r.uint64(), int64(r.uint64())
			if debt -= elapsed; debt > 0 {
				limit.entries = append(limit.entries, debtEntry{key, debt})
			}
		}
		limits[name] = limit
	}
	if r.failed {
		return nil, errCutOff
	}
	return limits, nil
}

// snapshotReader reads fields; past the end it reads zeros and remembers it.
type snapshotReader struct {
	data   []byte
	failed bool
}

func (r *snapshotReader) bytes(n int) []byte {
	if n > len(r.data) {
		r.data, r.failed = nil, true
		return make([]byte, n)
	}
	field := r.data[:n]
	r.data = r.data[n:]
	return field
}

func (r *snapshotReader) uint64() uint64 { return binary.LittleEndian.Uint64(r.bytes(8)) }
