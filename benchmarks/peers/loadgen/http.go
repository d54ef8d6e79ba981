package main

import (
	"bufio"
	"bytes"
	"net"
	"strconv"
)

var contentLength = []byte("content-length:")

// httpCaller keeps one connection of HTTP/1.1 with one request in flight.
type httpCaller struct {
	connection net.Conn
	reader     *bufio.Reader
	head       []byte
}

func connectHTTP(chosen options) ([]caller, error) {
	callers := make([]caller, 0, chosen.callers)
	for range chosen.callers {
		connection, err := net.Dial("tcp", chosen.target)
		if err != nil {
			return nil, err
		}
		callers = append(callers, &httpCaller{connection: connection, reader: bufio.NewReader(connection)})
	}
	return callers, nil
}

// call returns the status line and the headers of the response.
func (c *httpCaller) call(request []byte) ([]byte, error) {
	if _, err := c.connection.Write(request); err != nil {
		return nil, err
	}
	c.head = c.head[:0]
	length := 0
	for {
		line, err := c.reader.ReadSlice('\n')
		if err != nil {
			return nil, err
		}
		c.head = append(c.head, line...)
		if line = bytes.TrimSpace(line); len(line) == 0 {
			break
		}
		if len(line) > len(contentLength) && bytes.EqualFold(line[:len(contentLength)], contentLength) {
			value := bytes.TrimSpace(line[len(contentLength):])
			if length, err = strconv.Atoi(string(value)); err != nil {
				return nil, err
			}
		}
	}
	_, err := c.reader.Discard(length)
	return c.head, err
}
