package edgelimit

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash"
	mathrand "math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

// fleet is this instance's side of a store that instances share. It outlives
// reloads, so that they do not reconnect.
//
// Whether the store can be used is found out in the background, by a beat that
// also shows the others that this instance is there. A store that fails is left
// alone until a beat gets through again: no request pays for finding out.
type fleet struct {
	store    *SharedStore
	timeout  time.Duration
	pepper   string    // its check
	instance string    // random: a restarted process is another one
	hashers  sync.Pool // of keyHasher
	logger   atomic.Pointer[zap.Logger]

	conn     atomic.Pointer[StoreConn] // nil until the first connection
	usable   atomic.Bool
	failures atomic.Int32  // in a row
	calls    chan struct{} // one for each that is under way
	lastID   atomic.Uint64
	tripped  chan struct{}

	// Of the background alone.
	recovered int64         // when it was last found usable
	pause     time.Duration // after the last failure
	checked   int64         // when its settings were last looked at
	warned    []string      // about its settings
	untold    bool          // it does not tell them, which was said

	attempt   sync.Once
	attempted chan struct{} // closed when the first attempt to reach the store has ended

	starting sync.Once
	stop     chan struct{}
	stopped  chan struct{} // nil until started

	mu        sync.Mutex
	state     string
	cause     error
	since     time.Time
	instances int
	fewerFrom int64 // since when fewer instances are seen than instances says; 0: not so
	running   map[string]runningCharge
	lost      []StoreCharge // of in_flights: ended while the store could not be told
}

const (
	maxStoreCalls   = 512 // under way at the same time; rueidis queues without end
	failuresToTrip  = 20  // in a row
	probeInterval   = 200 * time.Millisecond
	flapTime        = 5 * time.Second
	maxPause        = 2 * time.Second
	beatInterval    = time.Second
	beatTTL         = 5 * time.Second
	beatTimeout     = 500 * time.Millisecond
	dialTimeout     = 2 * time.Second
	renewInterval   = 10 * time.Second
	inFlightTTL     = 3 * renewInterval
	checkInterval   = time.Minute
	fewerAfter      = 10 * time.Second // instances that fell silent count for so long
	maxLost         = 10_000
	goodbyeTimeout  = 100 * time.Millisecond
	denyCacheTime   = time.Second
	stateConnected  = "connected"
	stateConnecting = "connecting"
)

var errStoreUnusable = errors.New("the store cannot be used at the moment")

// useFleet takes the process's side of the store.
func useFleet(store *SharedStore, pepper []byte) (*fleet, stateKey, error) {
	check := sha256.Sum256(append([]byte("edge_limit store\x00"+store.ID+"\x00"), pepper...))
	key := stateKey{"store", string(check[:])}
	f, err := takeState(key, func() *fleet { return newFleet(store, pepper) })
	return f, key, err
}

func newFleet(store *SharedStore, pepper []byte) *fleet {
	id := make([]byte, 8)
	_, _ = rand.Read(id) // never fails, says crypto/rand
	f := &fleet{
		store: store, timeout: time.Duration(store.Timeout), instance: hex.EncodeToString(id),
		pepper:  hex.EncodeToString(pepperCheck(pepper)),
		tripped: make(chan struct{}, 1), calls: make(chan struct{}, maxStoreCalls), attempted: make(chan struct{}), stop: make(chan struct{}),
		state: stateConnecting, since: time.Now(), running: make(map[string]runningCharge),
	}
	if f.timeout == 0 {
		f.timeout = defaultStoreTimeout
	}
	f.hashers.New = func() any { return &keyHasher{mac: hmac.New(sha256.New, pepper)} }
	f.logger.Store(zap.NewNop())
	return f
}

// start connects, once.
func (f *fleet) start(logger *zap.Logger) {
	f.logger.Store(logger)
	f.starting.Do(func() {
		f.stopped = make(chan struct{})
		go f.run()
	})
}

// Destruct implements caddy.Destructor: the last configuration with this store
// is gone.
func (f *fleet) Destruct() error {
	close(f.stop)
	if f.stopped != nil {
		<-f.stopped
	}
	return nil
}

// run keeps the connection.
func (f *fleet) run() {
	defer close(f.stopped)
	renewed := clock()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			timer.Reset(jittered(f.visit()))
			if f.usable.Load() {
				f.tellLost()
			}
			if now := clock(); f.usable.Load() && now-renewed >= int64(renewInterval) {
				renewed = now
				f.renew()
			}
		case <-f.tripped:
			timer.Reset(jittered(f.pauseAfter(clock())))
		case <-f.stop:
			f.usable.Store(false)
			f.leave()
			return
		}
	}
}

// pauseAfter is how long a store that was just found to fail is left alone:
// longer each time where it fails soon after it has answered again, as when only
// a part of its keys can be reached.
func (f *fleet) pauseAfter(now int64) time.Duration {
	if now-f.recovered < int64(flapTime) {
		f.pause = min(max(2*f.pause, probeInterval), maxPause)
	} else {
		f.pause = probeInterval
	}
	return f.pause
}

// jittered keeps a fleet from doing the same thing at the same time.
func jittered(d time.Duration) time.Duration {
	return d/2 + time.Duration(mathrand.Int64N(int64(d)))
}

// visit shows the store that this instance is there, and finds out whether it
// can be used. It returns when to do so again.
func (f *fleet) visit() time.Duration {
	defer f.attempt.Do(func() { close(f.attempted) })
	conn := f.connected()
	if conn == nil {
		return probeInterval
	}
	usable := f.usable.Load()
	timeout := f.timeout // what requests will have to do with
	if usable {
		timeout = max(beatTimeout, timeout)
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	pulse, err := conn.Beat(ctx, Beat{Instance: f.instance, TTL: beatTTL, Pepper: f.pepper})
	switch {
	case err != nil && usable:
		f.failed(err, failuresToTrip/3+1)
		return probeInterval
	case err != nil:
		countStoreErrors(storeErrorKind(err), 1)
		f.setState(storeErrorKind(err), err)
		return probeInterval
	}
	f.see(pulse.Instances, clock())
	if pulse.OtherPepper {
		f.usable.Store(false)
		countStoreErrors(StorePepper, 1)
		f.setState(StorePepper, errOtherPepperInUse)
		return beatInterval
	}
	if !usable {
		f.failures.Store(0)
		f.usable.Store(true)
		f.recovered = clock()
		f.setState(stateConnected, nil)
		f.tellLost()
		f.renew()
	}
	if now := clock(); !usable || now-f.checked >= int64(checkInterval) {
		f.checked = now
		f.check(conn)
	}
	return beatInterval
}

var errOtherPepperInUse = &StoreError{
	Kind: StorePepper, Err: errors.New("other instances use this store with another pepper"),
	Advice: "give all instances the same pepper, or this one a prefix of its own; " +
		"a store whose instances are all gone takes a new pepper after a minute",
}

// connected returns the connection, which it makes if there is none.
func (f *fleet) connected() StoreConn {
	if conn := f.conn.Load(); conn != nil {
		return *conn
	}
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	conn, err := f.store.Dial(ctx)
	if err != nil {
		countStoreErrors(storeErrorKind(err), 1)
		f.setState(storeErrorKind(err), err)
		return nil
	}
	f.conn.Store(&conn)
	return conn
}

// check warns about the store's settings, once for as long as they are so.
func (f *fleet) check(conn StoreConn) {
	ctx, cancel := context.WithTimeout(context.Background(), beatTimeout)
	defer cancel()
	warnings, err := conn.Check(ctx)
	if err != nil {
		if !f.untold {
			f.logger.Load().Info("the store does not tell its settings", zap.Error(err))
		}
		f.untold = true
		return
	}
	f.untold = false
	for _, warning := range warnings {
		if !slices.Contains(f.warned, warning) {
			f.logger.Load().Warn(warning)
		}
	}
	f.warned = warnings
}

// leave says goodbye.
func (f *fleet) leave() {
	conn := f.conn.Load()
	if conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), goodbyeTimeout)
	defer cancel()
	_, _ = (*conn).Beat(ctx, Beat{Instance: f.instance, Pepper: f.pepper}) // its time runs out anyway
	(*conn).Close()
}

// call asks the store, for as long as timeout.
func (f *fleet) call(timeout time.Duration, ask func(context.Context, StoreConn) error) error {
	if !f.usable.Load() {
		timeout = f.awaitAttempt(timeout)
	}
	if !f.usable.Load() || timeout <= 0 {
		return errStoreUnusable
	}
	if timeout = f.awaitPlace(timeout); timeout <= 0 {
		countStoreErrors(StoreOverload, 1)
		return errStoreUnusable
	}
	defer func() { <-f.calls }()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	begin := clock()
	err := ask(ctx, *f.conn.Load())
	storeSeconds.Observe(time.Duration(clock() - begin).Seconds())
	if err != nil {
		f.failed(err, 1)
		return err
	}
	if f.failures.Load() != 0 {
		f.failures.Store(0)
	}
	return nil
}

// awaitPlace waits until not too many calls are under way, and returns what is
// left of the time, or nothing if it came to none.
func (f *fleet) awaitPlace(timeout time.Duration) time.Duration {
	select {
	case f.calls <- struct{}{}:
		return timeout
	default:
	}
	begin := clock()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case f.calls <- struct{}{}:
		return max(1, timeout-time.Duration(clock()-begin))
	case <-timer.C:
		return 0
	}
}

// awaitAttempt waits for the end of the first attempt to reach the store, and
// returns what is left of the time. An instance that has just started would else
// begin with its share of what the others have used up: crashes would make
// permits.
func (f *fleet) awaitAttempt(timeout time.Duration) time.Duration {
	select {
	case <-f.attempted:
		return timeout
	default:
	}
	begin := clock()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-f.attempted:
	case <-timer.C:
	}
	return timeout - time.Duration(clock()-begin)
}

// failed counts a failure, and leaves the store alone after some in a row, or at
// once where the next call would fail too.
func (f *fleet) failed(err error, weight int32) {
	kind := storeErrorKind(err)
	countStoreErrors(kind, 1)
	switch kind {
	case StoreTimeout, StoreNetwork, StoreStale, StoreOther:
		if f.failures.Add(weight) < failuresToTrip {
			return
		}
	}
	if f.usable.CompareAndSwap(true, false) {
		f.setState(kind, err)
		select {
		case f.tripped <- struct{}{}:
		default:
		}
	}
}

// setState tells of a change, once.
func (f *fleet) setState(state string, cause error) {
	f.mu.Lock()
	changed := f.state != state
	if changed {
		f.since = time.Now()
	}
	f.state, f.cause = state, cause
	instances := f.instances
	f.mu.Unlock()
	switch {
	case !changed:
	case state == stateConnected:
		f.logger.Load().Info("the store is in use: budgets are the fleet's", zap.Int("instances", instances))
	default:
		f.logger.Load().Warn("the store cannot be used: until it can, on_failure says what holds",
			zap.String("state", state), zap.String("on_failure", f.onFailure()), zap.Int("instances", f.size()), zap.Error(cause))
	}
}

func (f *fleet) onFailure() string {
	if f.store.OnFailure == "" {
		return onFailureLocal
	}
	return f.store.OnFailure
}

// see takes note of how many instances there are. That there are fewer is
// believed after a while: a store that was away has forgotten them all.
func (f *fleet) see(instances int, now int64) {
	instances = min(instances, maxFleet)
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case instances >= f.instances:
		f.instances, f.fewerFrom = instances, 0
	case f.fewerFrom == 0:
		f.fewerFrom = now
	case now-f.fewerFrom >= int64(fewerAfter):
		f.instances, f.fewerFrom = instances, 0
	}
}

// size is how many instances budgets are divided by where each has its share.
func (f *fleet) size() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return max(1, f.store.Fleet, f.instances)
}

// share is this instance's part of a count: at least 1, lest nothing passes.
func (f *fleet) share(count int64) int64 {
	if f.onFailure() == onFailureLocalFull {
		return count
	}
	return max(1, count/int64(f.size()))
}

// key names a budget in the store.
func (f *fleet) key(kind StoreKind, name string, material []byte) StoreKey {
	h := f.hashers.Get().(*keyHasher)
	defer f.hashers.Put(h)
	h.mac.Reset()
	h.text = binary.BigEndian.AppendUint64(h.text[:0], uint64(len(name)))
	h.text = append(h.text, name...)
	h.text = append(h.text, material...)
	_, _ = h.mac.Write(h.text) // never fails, says package hash
	h.text = h.mac.Sum(h.text[:0])
	return StoreKey{kind, [16]byte(h.text)}
}

// keyHasher is what hashing one key needs.
type keyHasher struct {
	mac  hash.Hash
	text []byte
}

// newID tells a charge from all others of the fleet.
func (f *fleet) newID() string {
	return f.instance + strconv.FormatUint(f.lastID.Add(1), 36)
}

// finish makes a call that has no answer for the request, but whose effect the
// client's next request should find: it is waited for as long as the request has
// time left for the store.
func (f *fleet) finish(left *time.Duration, call func()) {
	if *left <= 0 {
		go call()
		return
	}
	begin := clock()
	defer func() { *left -= time.Duration(clock() - begin) }()
	done := make(chan struct{})
	go func() {
		defer close(done)
		call()
	}()
	timer := time.NewTimer(*left)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
}

// storeReport is how the store stands.
type storeReport struct {
	State     string  `json:"state"`
	Since     float64 `json:"since"` // Unix time
	Error     string  `json:"error,omitempty"`
	OnFailure string  `json:"on_failure"`
	Instances int     `json:"instances"`
	Instance  string  `json:"instance"`
}

func (f *fleet) report() storeReport {
	size := f.size()
	f.mu.Lock()
	defer f.mu.Unlock()
	report := storeReport{
		State: f.state, Since: float64(f.since.UnixMilli()) / 1000,
		OnFailure: f.onFailure(), Instances: size, Instance: f.instance,
	}
	if f.cause != nil {
		report.Error = f.cause.Error()
	}
	return report
}

// Interface guards.
var _ caddy.Destructor = (*fleet)(nil)
