package redisstore

import (
	"bytes"
	"errors"
	"net"
	"strconv"
	"sync/atomic"
)

// guardedConn ends a connection whose server answers what no Redis would. The
// client library reads in a goroutine of its own and believes what it reads: a
// length beyond all bounds, or an answer that nobody has asked for, would be a
// panic there, and the end of the process.
type guardedConn struct {
	net.Conn
	counts bool // answers are counted: not where a server tells what it was not asked for
	in     frames
	out    frames

	asked    atomic.Int64
	answered int64
}

// Write implements net.Conn.
func (g *guardedConn) Write(p []byte) (int, error) {
	asked, _ := g.out.feed(p) // our own
	g.asked.Add(asked)
	return g.Conn.Write(p)
}

// Read implements net.Conn.
func (g *guardedConn) Read(p []byte) (int, error) {
	n, err := g.Conn.Read(p)
	answered, bad := g.in.feed(p[:n])
	g.answered += answered
	if bad == nil && g.counts && g.answered > g.asked.Load() {
		bad = errProtocol
	}
	if bad != nil {
		g.Conn.Close()
		return 0, bad
	}
	return n, err
}

var errProtocol = errors.New("the server does not keep to the protocol")

// Bounds of what servers answer to us.
const (
	maxText     = 1 << 20
	maxElements = 1 << 16
	maxDepth    = 8
)

// frames walks through a stream of RESP, the protocol of Redis (versions 2 and
// 3). The zero value stands at its beginning.
type frames struct {
	line []byte  // the beginning of a line that is not whole yet
	skip int64   // bytes of a text that are still to come, with its line end
	open []int64 // elements still to come, of each list that is open
	push bool    // the outermost list was not asked for
}

// feed reads on, and returns how many values have become whole, without those
// that were not asked for.
func (f *frames) feed(p []byte) (whole int64, err error) {
	for len(p) > 0 {
		if f.skip > 0 {
			n := min(f.skip, int64(len(p)))
			f.skip -= n
			p = p[n:]
			if f.skip == 0 {
				whole += f.end()
			}
			continue
		}
		end := bytes.IndexByte(p, '\n')
		if end < 0 {
			if f.line = append(f.line, p...); len(f.line) > maxText {
				return whole, errProtocol
			}
			return whole, nil
		}
		line := p[:end+1]
		if len(f.line) > 0 {
			f.line = append(f.line, line...)
			line = f.line
		}
		p = p[end+1:]
		n, err := f.header(bytes.TrimRight(line, "\r\n"))
		if err != nil {
			return whole, err
		}
		whole += n
		f.line = f.line[:0]
	}
	return whole, nil
}

// header reads a line that is a value, or begins one.
func (f *frames) header(line []byte) (whole int64, err error) {
	if len(line) == 0 {
		return 0, errProtocol
	}
	switch line[0] {
	case '+', '-', ':', '_', '#', ',', '(':
		return f.end(), nil
	case '$', '=', '!':
		n, err := length(line, maxText)
		if err != nil || n < 0 {
			return f.end(), err
		}
		f.skip = n + int64(len("\r\n"))
		return 0, nil
	case '*', '~', '%', '>':
		n, err := length(line, maxElements)
		if err != nil {
			return 0, err
		}
		if len(f.open) == 0 {
			f.push = line[0] == '>'
		}
		if line[0] == '%' {
			n *= 2 // a key and a value each
		}
		if n <= 0 {
			return f.end(), nil
		}
		if f.open = append(f.open, n); len(f.open) > maxDepth {
			return 0, errProtocol
		}
		return 0, nil
	}
	return 0, errProtocol
}

// length reads how long something is; -1 stands for nothing.
func length(line []byte, most int64) (int64, error) {
	n, err := strconv.ParseInt(string(line[1:]), 10, 64)
	if err != nil || n < -1 || n > most {
		return 0, errProtocol
	}
	return n, nil
}

// end ends a value, and the lists whose last element it is.
func (f *frames) end() (whole int64) {
	for len(f.open) > 0 {
		last := len(f.open) - 1
		if f.open[last]--; f.open[last] > 0 {
			return 0
		}
		f.open = f.open[:last]
	}
	if f.push {
		f.push = false
		return 0
	}
	return 1
}
