package edgelimit

import (
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

func testDenialLog() (*denialLog, *zap.Logger, *observer.ObservedLogs) {
	entryLines.Store(0)
	core, logs := observer.New(zap.DebugLevel)
	return new(denialLog), zap.New(core), logs
}

// A million denials of as many keys within four seconds: at most five lines a
// second, and no denial is left out of the count.
func TestFloodOfDenials(t *testing.T) {
	l, logger, logs := testDenialLog()
	const flood, seconds = 1_000_000, 4
	now := int64(time.Hour)
	for n := range flood {
		l.note(logger, denial{name: "a", wait: time.Minute}, uint64(n)<<20|2, now, false)
		now += int64(seconds * time.Second / flood)
	}
	if summaries := logs.FilterMessage("denials in sum").Len(); summaries < seconds-1 {
		t.Errorf("%d summaries in %d seconds of flood, want one a second", summaries, seconds)
	}
	l.written(l.summarize(logger, "a", now))
	if lines := logs.Len(); lines > 5*seconds+1 {
		t.Errorf("%d lines in %d seconds", lines, seconds)
	}
	told := 0
	for _, entry := range logs.All() {
		if n, ok := entry.ContextMap()["denied"].(int64); ok {
			told += int(n)
		} else {
			told++
		}
	}
	expect(t, told, flood, "denials that the lines tell of")
}

// A key that enters the limited state has one line, however often it is denied
// after that; when it was quiet it enters anew.
func TestKeyEntersOnce(t *testing.T) {
	l, logger, logs := testDenialLog()
	now := int64(time.Hour)
	for range 5 {
		l.note(logger, denial{name: "a", wait: 3 * time.Second}, 1<<20, now, false)
		now += int64(2 * time.Second)
	}
	expect(t, logs.FilterMessage("a request is denied, and more may be").Len(), 1, "lines for one key that goes on")
	now += int64(limitedForLeast)
	l.note(logger, denial{name: "a"}, 1<<20, now, true)
	expect(t, logs.FilterMessage("a request would be denied, and more may be").Len(), 1, "lines after it was quiet; a trial's says so")
	expect(t, logs.All()[0].ContextMap()["key"], any("0000000000100000"), "the key stands there as its hash")
}

// What no flood carries along is told of all the same.
func TestQuietDenialsAreSummarized(t *testing.T) {
	l, logger, logs := testDenialLog()
	now := int64(time.Hour)
	for range 3 {
		l.note(logger, denial{name: "a"}, 1<<20, now, false)
	}
	expect(t, l.scheduled, true, "a summary is on its way")
	l.written(l.summarize(logger, "a", now))
	l.written(l.summarize(logger, "a", now))
	summaries := logs.FilterMessage("denials in sum").All()
	expect(t, len(summaries), 1, "summaries; without a denial there is none")
	expect(t, summaries[0].ContextMap()["denied"], any(int64(2)), "denials beside the first")
}

// A log that takes nothing holds up one denial, and no other.
func TestLogThatTakesNothing(t *testing.T) {
	l, _, _ := testDenialLog()
	release, stuck := make(chan struct{}), make(chan struct{})
	hang := sync.OnceFunc(func() { close(stuck) }) // the next summary comes in a minute
	logger := zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zapcore.EncoderConfig{}), zapcore.AddSync(writerFunc(func(line []byte) (int, error) {
		hang()
		<-release
		return len(line), nil
	})), zap.DebugLevel))
	now := int64(time.Hour)
	var first sync.WaitGroup
	first.Go(func() { l.note(logger, denial{name: "a"}, 2, now, false) })
	<-stuck
	for n := range 100 {
		now += int64(time.Second)
		l.note(logger, denial{name: "a"}, uint64(n)<<20|4, now, false)
	}
	close(release)
	first.Wait()
	expect(t, l.denied, 100, "denials that are counted meanwhile, for the next summary")
	expect(t, l.writing, false, "a line is on its way")
}

type writerFunc func([]byte) (int, error)

func (w writerFunc) Write(line []byte) (int, error) { return w(line) }

// No line carries a client's address or any other part of a key.
func TestNoRawKeysInLogs(t *testing.T) {
	core, logs := observer.New(zap.DebugLevel)
	i := newInstance(t, `:80 {
		edge_limit {
			limit a 1/h {
				key client {http.request.header.X-Api-Key}
			}
			ceiling b 10/h
		}
		respond ok
	}`)
	i.handlers[0].logger = zap.New(core)
	for range 30 {
		i.get(alice, "/", "X-Api-Key: s3cret-key")
	}
	if logs.Len() == 0 {
		t.Fatal("nothing was logged")
	}
	for _, entry := range logs.All() {
		line := entry.Message
		for key, value := range entry.ContextMap() {
			line += " " + key + "=" + strings.TrimSpace(zapText(value))
		}
		if strings.Contains(line, alice) || strings.Contains(line, "s3cret") {
			t.Errorf("a raw key is logged: %s", line)
		}
	}
}
